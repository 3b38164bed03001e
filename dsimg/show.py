"""Tell how a run came about: each step from it back to the training images, with what was measured there.

dsimg show RUN
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from dsimg import cli
from dsimg.console import bytes_text, count_text, ms_text
from dsimg.errors import DataError, RunError
from dsimg.folder import read_index
from dsimg.metrics import accuracy_text
from dsimg.run import Run, read_json, sha256

# Of BatchNorm: kept with the weights, and not trained.
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

State = Literal["here", "moved", "made anew", "gone"]
STATES: dict[State, str] = {
    "here": "",
    "moved": "found beside the run, not where it was",
    "made anew": "! made anew since: what is there now is not the run that this one was made of",
    "gone": "! no longer there",
}


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """The flags of `dsimg show`."""

    source: tyro.conf.Positional[Path]
    """The run to tell of."""
    json: bool = False
    """Print one JSON object instead."""


@dataclass(frozen=True)
class Parent:
    """What a run was made of: the path and hash that its run.json recorded, and what has become of it."""

    path: Path  # where it is now, or was
    recorded: Path
    sha256: str
    state: State

    def as_dict(self) -> dict[str, str]:
        """Return the parent for JSON."""
        return {"path": str(self.path), "recorded": str(self.recorded), "sha256": self.sha256, "state": self.state}


@dataclass(frozen=True)
class Step:
    """One run of the ancestry, with what it says of itself; accuracies are `metrics.evaluation_report`'s shares."""

    run: Run
    sha256: str  # of its run.json
    parents: tuple[Parent, ...]
    begun_from: str | None  # published weights or a file, where it was no run
    parameters: int | None
    data: dict[str, Any] | None  # folder, classes, train and val images, and whether it is there
    accuracy: dict[str, dict[str, Any]]  # by what was measured: "validation", or the name of an evaluation
    latency: dict[str, float]  # seconds, by what was measured

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of run.json."""
        assert self.run.manifest is not None
        return self.run.manifest

    def as_dict(self) -> dict[str, Any]:
        """Return the step for JSON."""
        manifest = self.manifest
        return {
            "path": str(self.run.path),
            "sha256": self.sha256,
            **{key: manifest[key] for key in ("stage", "created", "dsimg", "git_commit", "seed")},
            "arch": manifest["model"]["arch"],
            "pruned": self.run.has("pruning"),
            "num_classes": manifest["model"]["num_classes"],
            "input_size": manifest["model"]["preprocess"]["input_size"],
            "parameters": self.parameters,
            "bytes": {role: file["bytes"] for role, file in manifest["files"].items()},
            "accuracy": self.accuracy,
            "latency": self.latency,
            "parents": [parent.as_dict() for parent in self.parents],
            "begun_from": self.begun_from,
            "data": self.data,
        }


def show(config: ShowConfig) -> list[Step]:
    """Tell how a run came about: each step from it back to the training images."""
    steps = ancestry(Run.open(config.source))
    terminal = cli.context().terminal
    if config.json:
        terminal.data(json.dumps({"steps": [step.as_dict() for step in steps]}))
        return steps
    for step in steps:
        terminal.table(f"{step.manifest['stage']}  {step.run.path}", _rows(step))
    return steps


def ancestry(run: Run) -> list[Step]:
    """Return the run and what it was made of, nearest first, each once. A parent is known by the hash of its run.json:
    one that moved along with the run is found beside it, and one that was made anew is not followed. Raises RunError.
    """
    steps: list[Step] = []
    known: set[str] = set()
    waiting = [run]
    while waiting:
        one = waiting.pop(0)
        step = _step(one)
        if step.sha256 in known:
            continue
        known.add(step.sha256)
        steps.append(step)
        waiting += [Run.open(parent.path) for parent in step.parents if parent.state in ("here", "moved")]
    return steps


def count_parameters(weights: Path) -> int | None:
    """Return how many trained values a safetensors file holds; None where it holds none, or cannot be read.

    The header is a JSON object behind its length, 8 bytes: the package need not be installed where runs are looked at.
    """
    try:
        with weights.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            if size > weights.stat().st_size:
                return None
            header = json.loads(stream.read(size))
        shapes = [tensor["shape"] for name, tensor in header.items() if not _is_left_out(name)]
        return sum(map(math.prod, shapes)) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_left_out(name: str) -> bool:
    return name == "__metadata__" or name.rpartition(".")[2] in BUFFERS


def _step(run: Run) -> Step:
    manifest = run.manifest
    assert manifest is not None
    parents = tuple(find_parent(entry, child=run.path) for entry in manifest["parents"])
    digest = sha256(run.path / "run.json")
    config = read_json(run.path / "config.json") if (run.path / "config.json").exists() else {}
    return Step(
        run=run,
        sha256=digest,
        parents=parents,
        begun_from=_begun_from(config, parents),
        parameters=count_parameters(run.path / "weights.safetensors") if run.has("weights") else None,
        data=None if any(parent.state in ("here", "moved") for parent in parents) else _data(run),
        accuracy=_accuracy(run),
        latency=_latency(run, digest),
    )


def find_parent(entry: Mapping[str, str], *, child: Path) -> Parent:
    """Return a parent that the run `child` recorded: where it was, or beside the run; known by its hash."""
    recorded, digest = Path(entry["path"]), entry["sha256"]
    beside = child.resolve().parent / recorded.name
    if _hash_of(recorded) == digest:
        return Parent(recorded, recorded, digest, "here")
    if not recorded.is_absolute():  # as from the folder where the command was given, which is not known
        for folder in child.resolve().parents:
            if _hash_of(folder / recorded) == digest:
                return Parent(folder / recorded, recorded, digest, "here")
    if _hash_of(beside) == digest:
        return Parent(beside, recorded, digest, "moved")
    return Parent(recorded, recorded, digest, "gone" if _hash_of(recorded) is None else "made anew")


def _hash_of(path: Path) -> str | None:
    manifest = path / "run.json"
    return sha256(manifest) if manifest.is_file() else None


def _begun_from(config: Mapping[str, Any], parents: tuple[Parent, ...]) -> str | None:
    """Return the published weights or the user's function that a run without parents began with."""
    given = config.get("weights") or (config.get("source") if not parents else None)
    if given is None or str(given) in {str(parent.recorded) for parent in parents}:
        return None
    return " ".join(given) if isinstance(given, list) else str(given)


def _data(run: Run) -> dict[str, Any] | None:
    if not run.has("index"):
        return None
    try:
        index = read_index(run.file("index"))
    except (DataError, RunError):
        return None
    return {
        "folder": str(index.root),
        "classes": len(index.classes),
        "train": len(index.train.files),
        "val": len(index.val.files),
        "there": index.train.folder.is_dir(),
    }


def _accuracy(run: Run) -> dict[str, dict[str, Any]]:
    """Return what the run says of its accuracy, and what `dsimg evaluate` measured since: images and top1."""
    assert run.manifest is not None
    found: dict[str, dict[str, Any]] = {}
    metrics = run.manifest["metrics"]
    own = metrics.get("validation") or metrics.get("int8")  # of a training, of quantize
    if own is not None:
        found["validation"] = {"images": own["images"], "top1": own["top1"]}
    for report in sorted(run.path.glob("evaluations/*/evaluation.json")):
        content = read_json(report)
        found[report.parent.name] = {"images": content["images"], "top1": content["top1"]}
    return found


def _latency(run: Run, digest: str) -> dict[str, float]:
    """Return what the stage measured of its own network, and what `dsimg bench` did into the folder `bench` beside."""
    assert run.manifest is not None
    metrics = run.manifest["metrics"]
    pruned = metrics.get("pruning", {}).get("latency")
    seconds = pruned["seconds"] if pruned else {}
    found = {name.removeprefix("pruned "): value for name, value in seconds.items() if name.startswith("pruned ")}
    if "latency_ms" in metrics.get("int8", {}):
        found["int8"] = metrics["int8"]["latency_ms"]["p50"] / 1000
    bench = run.path.resolve().parent / "bench" / "bench.json"
    if bench.is_file():
        content = read_json(bench)
        names = {entry["run"] for entry in content["runs"] if entry["sha256"] == digest}
        for row in content["measurements"]:
            if row["run"] in names:
                threads, images = row["threads"], row["batch_size"]
                named = f"bench, {threads} thread{'s' * (threads != 1)}, {images} image{'s' * (images != 1)}"
                found[named] = row["p50_ms"] / 1000
    return found


def _rows(step: Step) -> list[tuple[str, str]]:
    manifest = step.manifest
    model = manifest["model"]
    _, height, width = model["preprocess"]["input_size"]
    parameters = f"{count_text(step.parameters)} parameters, " if step.parameters else ""
    pruned = ", pruned" if step.run.has("pruning") else ""
    rows = [("network", f"{model['arch']}{pruned}: {parameters}{model['num_classes']} classes, {height}x{width}")]
    sizes = [(file["path"], file["bytes"]) for file in manifest["files"].values() if _is_network(file["path"])]
    rows += [("size" if i == 0 else "", f"{bytes_text(size)}, {path}") for i, (path, size) in enumerate(sizes)]
    for i, (name, found) in enumerate(step.accuracy.items()):
        named = "" if name == "validation" else f", evaluations/{name}"
        text = f"{accuracy_text(found['top1'])}, {found['images']:,} images{named}"
        rows.append(("Top-1" if i == 0 else "", text))
    for i, (name, seconds) in enumerate(step.latency.items()):
        rows.append(("latency" if i == 0 else "", f"{ms_text(seconds)}, {name}"))
    commit = f", commit {manifest['git_commit'][:10]}" if manifest["git_commit"] else ""
    when = re.sub(r"T(\d\d:\d\d).*", r" \1 UTC", manifest["created"])
    rows.append(("made", f"{when}, dsimg {manifest['dsimg']}{commit}"))
    for i, parent in enumerate(step.parents):
        said = f"  ({STATES[parent.state]})" if STATES[parent.state] else ""
        rows.append(("of" if i == 0 else "", f"{parent.path}{said}"))
    if step.begun_from is not None:
        rows.append(("begun from", step.begun_from))
    if step.data is not None:
        data = step.data
        there = "" if data["there"] else "  (! no longer there)"
        counts = f"{data['train']:,} training and {data['val']:,} validation images"
        rows.append(("images", f"{data['folder']}: {counts}, {data['classes']} classes{there}"))
    return rows


def _is_network(path: str) -> bool:
    return path.endswith((".onnx", "weights.safetensors"))


if __name__ == "__main__":
    cli.run(show)
