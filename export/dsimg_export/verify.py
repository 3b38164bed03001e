"""Prove that a run says on this machine what it said where it was made, or name the first step that differs.

dsimg verify --source RUN

Nothing is written.
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx

from dsimg import cli
from dsimg.console import bytes_text
from dsimg.errors import ConfigError, DsimgError, RunError
from dsimg.evaluation import Evaluation, find_split, read_predictions
from dsimg.folder import Split
from dsimg.machine import all_cores, int8_is_exact
from dsimg.metrics import accuracy_text
from dsimg.preprocess import Preprocess
from dsimg.run import Run, read_json, sha256
from dsimg.runtime import Provider
from dsimg.show import Parent, find_parent
from dsimg_export.golden import (
    Golden,
    Limit,
    compare_logits,
    compare_normalising,
    compare_orientation,
    compare_resizing,
    decoded_here,
    made_on,
    read_golden,
)
from dsimg_export.measuring import evaluate_session
from dsimg_export.served import Served, open_served, role_here
from dsimg_export.session import Precision, int8_share, operators_run, precision_of

# What other kernels explain: without fusions the logits of two fp32 networks changed by up to 4e-7 of their spread,
# those of five in int8 by up to 1.6 %; numbers of threads and batch sizes changed nothing (docs/log.md). fp32: beyond
# that by orders, because a GPU sums in another order. fp16: 11 bits.
LIMITS: dict[Precision, Limit] = {
    "fp32": Limit(spread=1e-3, peak=1e-5),
    "fp16": Limit(spread=0.05, peak=1e-3),
    "int8": Limit(spread=0.05, peak=0.015),
}
SAME_IMAGES = 0.9  # of the images on both sides must have one name, or the record is of others
CHANGED_SHARE = 0.02  # of the predictions on the same images, which rounding may change, and never less than one
CHANGED_BY_TRAINING = 0.05  # by the precision of training as well, often bf16: 2 of 359 digits in a ResNet-20
OPERATORS_SHOWN = 6
X86 = ("x86_64", "amd64")


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """The flags of `dsimg verify`."""

    source: Path
    """The run to verify, with an ONNX file."""
    data: str | None = None
    """Also measure the accuracy on these labelled images, and compare it with what is recorded of the same images.
    Default: only the golden images that the run carries."""
    provider: Provider = "cpu"
    """Where ONNX Runtime runs the file: cpu, cuda, tensorrt; one that is not there is an error."""
    threads: int | None = None
    """Threads of ONNX Runtime's session, and threads that decode with --data. Default: one a core."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads is {self.threads}; it must be at least 1.")


def verify(config: VerifyConfig) -> list[tuple[str, str]]:
    """Prove that a run says on this machine what it said where it was made.

    In Python: returns each check with what it found. Raises the error of the first check that fails, with the check's
    name, after the table of all was printed.
    """
    return verify_but(config, without=())


def verify_but(config: VerifyConfig, *, without: Collection[str]) -> list[tuple[str, str]]:
    """As `verify`, without the checks of these names."""
    run = Run.open(config.source)
    if not run.has("model"):
        raise RunError(
            f"{run.path} has no ONNX file to verify. `dsimg export --source {run.path}` makes a run with one."
        )
    split = None if config.data is None else find_split(run, config.data, run.model["classes"])[0]
    verification = _Verification(run, config, split)
    checks = [(name, check) for name, check in verification.checks() if name not in without]
    rows: list[tuple[str, str]] = []
    terminal = cli.context().terminal
    for place, (name, check) in enumerate(checks):
        try:
            rows.append((name, check()))
        except DsimgError as error:
            rows.append((name, "FAILS"))
            rows += [(later, "not looked at") for later, _ in checks[place + 1 :]]
            terminal.table(str(run.path), rows)
            raise type(error)(f"{run.path} fails at '{name}': {error}") from error
    terminal.table(str(run.path), rows)
    terminal.say(f"{run.path} says here what it said where it was made.")
    return rows


class _Verification:
    """A run under verification, with what several checks read, opened when the first one needs it."""

    def __init__(self, run: Run, config: VerifyConfig, split: Split | None) -> None:
        self.run = run
        self.config = config
        self.split = split
        self.role = role_here(run, config.provider)

    def checks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield the checks in the order in which one that fails explains those after it."""
        yield "files", self.files
        yield "labels", self.labels
        yield "preprocess", self.preprocess
        yield "session", self.session
        if self.config.provider != "tensorrt":  # one engine, whose inside ONNX Runtime cannot write out
            yield "operators", self.operators
        yield "decode", self.decode
        yield "orientation", lambda: compare_orientation(self.golden, self.pictures)
        yield "resize", lambda: compare_resizing(self.golden, self.pictures, self.served.preprocess)
        yield "normalise", lambda: compare_normalising(self.golden, self.served.preprocess)
        yield "model", self.model
        yield "parent", self.parent
        split = self.split
        if split is not None:
            yield "accuracy", lambda: self.accuracy(split)

    @cached_property
    def golden(self) -> Golden:
        return read_golden(self.run.file("golden"))

    @cached_property
    def proto(self) -> Any:
        return onnx.load(self.run.file(self.role))

    @cached_property
    def served(self) -> Served:
        threads = self.config.threads or all_cores()
        return open_served(self.run, role=self.role, threads=threads, provider=self.config.provider)

    @cached_property
    def pictures(self) -> list[Any]:
        return decoded_here(self.golden)

    def files(self) -> str:
        """Hash every file that run.json lists."""
        assert self.run.manifest is not None
        listed = self.run.manifest["files"]
        bad = []
        for entry in listed.values():
            path = self.run.path / str(entry["path"])
            if not path.exists():
                bad.append(f"{entry['path']} is missing")
            elif path.stat().st_size != entry["bytes"]:
                bad.append(f"{entry['path']} has {path.stat().st_size:,} bytes instead of {entry['bytes']:,}")
            elif sha256(path) != entry["sha256"]:
                bad.append(f"{entry['path']} has other bytes than those that were hashed")
        if bad:
            raise RunError(f"{'; '.join(bad)}. Copy the run again from where it was made.")
        self.run.file("golden")
        size = sum(entry["bytes"] for entry in listed.values())
        return f"{len(listed)} files, {bytes_text(size)}, with the hashes in run.json"

    def labels(self) -> str:
        """Compare the four places that name the classes."""
        expected = self.run.model["classes"]
        text = self.run.file("labels").read_bytes().decode("utf-8", "surrogateescape")
        others: list[tuple[str, Sequence[str]]] = [
            ("labels.txt", text.removesuffix("\n").split("\n")),
            ("golden.safetensors", self.golden.classes),
        ]
        in_file = self._metadata("classes")
        if in_file is not None:
            others.append((self._name, in_file))
        for where, names in others:
            if list(names) != expected:
                raise RunError(f"{_first_other(expected, names, where)} Copy the run again from where it was made.")
        places = ", ".join(("run.json", *(where for where, _ in others)))
        return f"{len(expected)} classes, in one order in {places}"

    def preprocess(self) -> str:
        """Compare run.json's preprocess with what the ONNX file says of itself."""
        Preprocess.from_dict(self.run.model["preprocess"])
        ours, theirs = self.run.model["preprocess"], self._metadata("preprocess")
        if theirs is None:
            return f"{self._name} says nothing of it: see resize and normalise"
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise RunError(
                    f"{key} is {ours.get(key)} in run.json, and {theirs.get(key)} in {self._name}, which was exported "
                    "with it. Copy run.json again."
                )
        return f"the same in run.json and {self._name}"

    def session(self) -> str:
        """Open the file for this machine."""
        served, provider = self.served, self.config.provider
        why = ""
        if self.role == "reduced":
            why = "; 7-bit weights, because int8 sums saturate on this processor"
        elif self.precision == "int8" and provider == "cpu" and not int8_is_exact():
            why = "; int8 sums saturate on this processor, and the run has no file with 7-bit weights"
        if provider == "cpu" and self._signed and made_on()["processor"].lower() in X86:
            why += "; activations are signed, as for ARM, and slow on x86: quantize the export on such a machine"
        return f"{served.path.name} in {self.precision} on {provider}, onnxruntime {made_on()['onnxruntime']}{why}"

    def operators(self) -> str:
        """Say what the session runs, which the file alone does not tell."""
        path, provider = self.served.path, self.config.provider
        counts = operators_run(path, provider)
        most = counts.most_common(OPERATORS_SHOWN)
        rest = counts.total() - sum(count for _, count in most)
        text = ", ".join(f"{count} {name}" for name, count in most) + (f" and {rest} more" if rest else "")
        if self.precision == "int8" and provider == "cpu":
            share = int8_share(counts)
            text = f"{share.int8} of {share.total} convolutions and matrix products in int8; {text}"
        return text

    def decode(self) -> str:
        """Decode the golden images."""
        made_by, here = self.golden.made_by, made_on()
        text = f"{len(self.pictures)} images, {bytes_text(sum(map(len, self.golden.encoded)))}"
        return text + _versions((("pillow", made_by.get("pillow"), here["pillow"]),))

    def model(self) -> str:
        """Compare the network's logits on the recorded pixels."""
        golden, made_by, here = self.golden, self.golden.made_by, made_on(self.config.provider)
        differing = _versions(tuple((key, made_by.get(key), here[key]) for key in here if key != "pillow"))
        role, served = self.role, self.served
        if self.precision == "int8" and role == "model" and made_by.get("int8") == "saturating" != here["int8"]:
            # What was recorded of it is wrong by saturation; the twin says the same on both.
            if "reduced" not in golden.logits or not self.run.has("reduced"):
                raise RunError(
                    "the logits were recorded on a processor where int8 sums saturate, which they do not here, and the "
                    "run has no file with 7-bit weights to compare instead. Quantize it again on a machine like this."
                )
            role, served = "reduced", open_served(self.run, role="reduced", provider=self.config.provider)
        if role not in golden.logits:
            raise RunError(
                f"golden.safetensors has no logits of {served.path.name}, only of {', '.join(sorted(golden.logits))}. "
                "Make the run again with this dsimg."
            )
        limit = LIMITS[self.precision]
        try:
            text = compare_logits(golden.logits[role], served.logits(golden.views.pixels), limit=limit)
        except RunError as error:
            remedy = (
                "Install the versions that it was recorded with, or make the run again here"
                if differing
                else "The machine is like the one that it was recorded on: copy the run again"
            )
            raise RunError(f"{error} in {self.precision}{differing}. {remedy}.") from error
        instead = "" if served is self.served else f"{served.path.name}, which is alike on all processors: "
        return f"{instead}{text} (limit {limit.spread:g}){differing}"

    def parent(self) -> str:
        """Compare with the run that this one was made from, where it still is."""
        found = []
        for entry in self._parents:
            try:
                found.append(self._compare_parent(find_parent(entry, child=self.run.path)))
            except (DsimgError, OSError) as error:
                found.append(f"{entry['path']} cannot be read ({str(error).rstrip('.')}): not compared")
        return "; ".join(found) or "none"

    def accuracy(self, split: Split) -> str:
        """Measure the accuracy, and compare the predictions with those recorded of the same images."""
        served, threads = self.served, self.config.threads or all_cores()
        found = evaluate_session(
            served.logits,
            split=split,
            preprocess=served.preprocess,
            classes=served.classes,
            threads=threads,
        )
        text = f"Top-1 {accuracy_text(found.report['top1'])} of {found.report['images']:,} images"
        predicted = dict(zip(found.split.files, _predicted(found, served.classes), strict=True))
        unreadable = {entry["file"]: entry["reason"] for entry in found.report["bad_images"]}
        others = ""
        for path, share, doubt in self._recorded():
            if _role_of(path) not in (None, self.role):
                others = f" by {served.path.name}, only by its twin for other processors"
                continue  # whose predictions differ by more than rounding
            recorded = {file: row["predicted"] for file, row in read_predictions(path).items()}
            common = recorded.keys() & split.files
            if len(common) < SAME_IMAGES * max(len(recorded), len(split.files)):
                continue
            lost = sorted(common & unreadable.keys())
            if lost:
                raise RunError(
                    f"{text}; {len(lost)} more that {path} has predictions of cannot be read here, first {lost[0]} "
                    f"({unreadable[lost[0]]}). Copy the images again, or install the Pillow that the run names."
                )
            changed = sum(recorded[file] != predicted[file] for file in common)
            if changed > max(1, share * len(common)):
                raise RunError(
                    f"{text}, and {changed} predictions are others than in {path}: more than rounding explains. "
                    f"dsimg evaluate --source {self.run.path} says which."
                )
            whole = len(common) == len(recorded) == len(split.files)
            among = "" if whole else f", among {len(common):,} images that are in both"
            return f"{text}; {changed or 'no'} prediction{'s' * (changed != 1)} other than in {path}{among}{doubt}"
        return f"{text}; nothing is recorded of these very images{others}: not compared"

    @cached_property
    def precision(self) -> Precision:
        """What the file computes in."""
        return precision_of(self.proto)

    @property
    def _signed(self) -> bool:
        """Whether activations are quantized to signed integers."""
        points = {node.input[2] for node in self.proto.graph.node if node.op_type == "QuantizeLinear"}
        kinds = {tensor.name: tensor.data_type for tensor in self.proto.graph.initializer}
        return any(kinds.get(name) == onnx.TensorProto.INT8 for name in points)

    @property
    def _name(self) -> str:
        return str(self.run.file(self.role).name)

    def _recorded(self) -> Iterator[tuple[Path, float, str]]:
        """Yield predictions recorded of the run, the share of them that may differ, and what speaks against them; those
        that prove most first.

        The run's own, and those of the training that was exported without a loss, are hashed; what `dsimg evaluate`
        wrote may have been measured on this very machine, which would be compared with itself. The latest first.
        """
        if self.run.has("predictions"):
            yield self.run.file("predictions"), CHANGED_SHARE, ""
        if self.precision != "int8":
            for entry in self._parents:
                with contextlib.suppress(DsimgError, OSError):
                    parent = find_parent(entry, child=self.run.path)
                    if parent.state in ("here", "moved"):
                        yield Run.open(parent.path).file("predictions"), CHANGED_BY_TRAINING, ", made in training"
        found = self.run.path.glob("evaluations/*/predictions.csv")
        for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
            yield path, CHANGED_SHARE, ", which is not hashed and may have been measured here"

    @property
    def _parents(self) -> list[dict[str, str]]:
        assert self.run.manifest is not None
        return list(self.run.manifest["parents"])

    def _metadata(self, key: str) -> Any:
        """Return what the ONNX file says of itself, or None."""
        for entry in self.proto.metadata_props:
            if entry.key == f"dsimg.{key}":
                return json.loads(entry.value)
        return None

    def _compare_parent(self, recorded: Parent) -> str:
        path = recorded.path
        if recorded.state == "gone":
            return f"{path} is not here: not compared"
        if recorded.state == "made anew":
            return f"{path} has been made anew since: not compared"
        parent = Run.open(path)
        if not parent.has("model"):
            return f"{path} is as it was; its network is torch's, and export compared with it"
        block = parent.model
        same_input = block["preprocess"]["input_size"] == self.run.model["preprocess"]["input_size"]
        if not same_input or block["classes"] != self.run.model["classes"]:
            return f"{path} is of another input size or other classes: not compared"
        pixels = self.golden.views.pixels
        theirs = open_served(parent, provider=self.config.provider).logits(pixels)
        # Whatever was done in between may change logits, so no size of the difference is wrong in itself.
        return f"{path}: {compare_logits(theirs, self.served.logits(pixels), limit=None)}"


def _first_other(expected: Sequence[str], names: Sequence[str], where: str) -> str:
    if len(names) != len(expected):
        return f"{where} names {len(names)} classes, and run.json {len(expected)}."
    place = next(i for i, (ours, theirs) in enumerate(zip(expected, names, strict=True)) if ours != theirs)
    return f"class {place} is '{expected[place]}' in run.json, and '{names[place]}' in {where}."


def _versions(entries: Sequence[tuple[str, Any, Any]]) -> str:
    """Return what differs between where the golden images were recorded and here."""
    differing = [f"{name} {there}, here {here}" for name, there, here in entries if there != here]
    return f"; recorded with {'; '.join(differing)}" if differing else ""


def _predicted(evaluation: Evaluation, classes: Sequence[str]) -> list[str]:
    return ["" if label < 0 else classes[label] for label in evaluation.top[:, 0].tolist()]


def _role_of(predictions: Path) -> str | None:
    """Return the role of the ONNX file that gave predictions, as the report beside them has it; None where it does not
    say."""
    try:
        measured = read_json(predictions.with_name("evaluation.json")).get("measured")
    except RunError:
        return None
    return str(measured["role"]) if isinstance(measured, dict) and "role" in measured else None


if __name__ == "__main__":
    cli.run(verify)
