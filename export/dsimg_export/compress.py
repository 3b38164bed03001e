"""Find the fastest network that is good enough: students, pruned and quantized, each tried by commands of dsimg.

dsimg compress --source RUN --data DIR --out DIR --max_drop 0.01 --target_latency 5ms

Every step is a command that is shown before it runs, and a run folder in --out. Latencies are measured before anything
is trained, then the candidates are tried from the cheapest on; one that cannot win any more is not trained.
"""

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsimg import cli
from dsimg.console import ms_text
from dsimg.errors import ConfigError, ModelError, RunError
from dsimg.evaluation import find_split
from dsimg.folder import is_folder, read_index
from dsimg.metrics import accuracy_text
from dsimg.recipe import latency_goal
from dsimg.run import Run, as_plain, hold_lock, read_json, remove_run, sha256, write_json, writing_in
from dsimg.runtime import require_onnxruntime, require_torch
from dsimg_export.chain import EVALUATION, Chain, FailedError
from dsimg_export.commands import Runner, run_command
from dsimg_export.report import EQUAL, build_report, shown_rows, write_report
from dsimg_export.search_space import Candidate, Measured, Probed, default_students, in_order, seconds_of, why_not
from dsimg_export.wanted import CompressConfig, ratios_of, target_of, wanted_text

__all__ = ["CompressConfig", "compress", "search"]

STATE = "compress.json"
# What may be another when the same search goes on: it changes what is tried and chosen, and no run.
FREE = (
    "out",
    "students",
    "ratios",
    "max_drop",
    "target_latency",
    "latency_batch",
    "latency_threads",
    "budget_minutes",
)


def compress(config: CompressConfig) -> Run:
    """Find the fastest network within --max_drop of a run's accuracy, by distilling, pruning and quantizing it."""
    require_torch("training what is compressed")
    require_onnxruntime("measuring what is compressed")
    return search(config, run=run_command)


@dataclass
class _Search:
    """What is known so far."""

    probed: dict[tuple[str, float], Probed]
    floor: float  # the least accuracy that is good enough
    target: float | None  # seconds in the probe
    measured: dict[Candidate, Measured] = field(default_factory=dict)
    trained: dict[tuple[str, float], Measured] = field(default_factory=dict)  # what training said of its network
    dropped: dict[Candidate, str] = field(default_factory=dict)  # why
    failed: set[Candidate] = field(default_factory=set)  # of those that are dropped

    def why_not(self, candidate: Candidate) -> str | None:
        """Return why a candidate cannot win, as far as is known, or None."""
        return why_not(
            candidate,
            probed=self.probed,
            measured=self.measured,
            trained=self.trained,
            failed=self.failed,
            floor=self.floor,
            target=self.target,
        )


def search(config: CompressConfig, *, run: Runner) -> Run:
    """Do what `compress` does; `run` runs a command and returns its exit code.

    Raises ModelError where no candidate is good enough and fast enough; the report is written all the same.
    """
    begun = time.monotonic()
    source = _open_source(config)
    own = str(source.model["arch"])
    named = default_students(own) if config.students is None else config.students
    students = tuple(dict.fromkeys(student for student in named if student != own))
    _check_data(config, source)
    _claim(config, source)
    terminal = cli.context().terminal
    terminal.table("plan", _plan_rows(config, own, students))
    chain = Chain(config, source, run)
    reference = Candidate(arch=own, ratio=1.0, precision="fp32")
    try:
        found = _Search(probed=chain.probe(students), floor=0.0, target=None)
        _check_students(config, found.probed)
        found.measured[reference] = first = chain.finish(reference)
    except FailedError as error:
        raise ModelError(f"{error}, and nothing can be compared without it. Mend what it says above.") from error
    found.floor = first.accuracy - config.max_drop - EQUAL
    found.target = target_of(config, seconds_of(reference, found.probed))
    terminal.say(f"good enough is Top-1 {found.floor:.2%}; the source has {first.accuracy:.2%}")
    for candidate in in_order(own, students, ratios_of(config), found.probed):
        if candidate == reference:
            continue
        # What an earlier start has finished is part of the report, whatever it wanted.
        finished = chain.has(candidate)
        reason = None if finished else found.why_not(candidate)
        budget = math.inf if config.budget_minutes is None else config.budget_minutes
        if reason is None and not finished and time.monotonic() - begun > 60 * budget:
            reason = f"not tried: --budget_minutes {budget:g} were over"
        if reason is None:
            try:
                trained = chain.trained(candidate)
                if trained is not None:
                    found.trained[candidate.arch, candidate.ratio] = trained
                reason = None if finished else found.why_not(candidate)
                if reason is None:
                    found.measured[candidate] = chain.finish(candidate)
            except FailedError as error:
                reason = str(error)
                found.failed.add(candidate)
        if reason is None:
            terminal.say(f"{candidate.name}: Top-1 {found.measured[candidate].accuracy:.2%}")
        else:
            found.dropped[candidate] = reason
            terminal.say(f"{candidate.name}: dropped, {reason}")
    return _conclude(config, source, reference, chain, found)


def _open_source(config: CompressConfig) -> Run:
    source = Run.open(config.source)
    if not source.has("weights"):
        raise RunError(f"{config.source} has no weights to learn from. Give the trained run that it was made of.")
    out, place = config.out.resolve(), config.source.resolve()
    if out == place or place in out.parents:
        raise RunError(f"--out {config.out} lies in the source {config.source}. Choose another one.")
    return source


def _check_data(config: CompressConfig, source: Run) -> None:
    """Raise ConfigError, or DataError, where there are no images, or the source and what is trained here would be
    measured on different ones."""
    if config.data is not None and not is_folder(Path(config.data)):
        raise ConfigError(
            f"--data {config.data} is no folder. Leave it out for the images that {config.source} was trained on."
        )
    split, _ = find_split(source, config.data, source.model["classes"])
    if config.data is None:
        return
    folder = Path(config.data)
    held_out = set(read_index(source.file("index")).val.files) if source.has("index") else set()
    if split.folder.resolve() == folder.resolve() and not set(split.files) <= held_out:
        raise ConfigError(
            f"--data {folder} has no val/ folder: what is trained here would be measured on a part of the images, and "
            "the source on all. Give a folder with train/ and val/."
        )


def _check_students(config: CompressConfig, probed: Mapping[tuple[str, float], Probed]) -> None:
    """Raise ConfigError where a network that was asked for by name cannot be: rather now than in the report."""
    for student in config.students or ():
        known = probed.get((student, 1.0))
        if known is not None and known.error is not None:
            raise ConfigError(f"--students {student}: {known.error}")


def _claim(config: CompressConfig, source: Run) -> None:
    """Take --out for this search, or go on with the search that is there. Raises RunError, ConfigError."""
    out = config.out
    state = out / STATE
    if config.recipe is not None and not config.recipe.is_file():
        raise ConfigError(f"cannot read --recipe {config.recipe}: there is no such file. Give a TOML file.")
    given = {flag: _content(Path(value)) for flag in ("recipe", "deepspeed_config") if (value := getattr(config, flag))}
    asked = {**as_plain(config), "source_sha256": sha256(source.path / "run.json"), "sha256": given}
    asked = json.loads(json.dumps(asked))
    with writing_in(out):
        if not state.exists():
            # What a kill between the lock and the state leaves is no stranger's.
            if out.exists() and (not out.is_dir() or any(not entry.name.startswith(".") for entry in out.iterdir())):
                raise RunError(f"--out {out} holds something other than a search. Choose another --out.")
            out.mkdir(parents=True, exist_ok=True)
        hold_lock(out)
    if state.exists():
        kept = read_json(state)
        if kept.get("source_sha256") != asked["source_sha256"] and kept.get("source") == asked["source"]:
            raise RunError(f"{config.source} has been made anew since {out} was begun. Choose another --out.")
        differing = [
            f"--{key} was {kept.get(key)}, now {value}"
            for key, value in asked.items()
            if key not in (*FREE, "source_sha256", "sha256") and kept.get(key) != value
        ]
        if not differing and kept.get("sha256") != given:
            differing = [f"there is something else in {' or '.join(str(getattr(config, flag)) for flag in given)}"]
        if differing:
            raise ConfigError(f"{out} was begun with other flags: {'; '.join(differing)}. Choose another --out.")
    write_json(state, asked)


def _content(path: Path) -> str | None:
    """Return the hash of a file of flags; None for the name of one that comes with dsimg."""
    return sha256(path) if path.is_file() else None


def _plan_rows(config: CompressConfig, own: str, students: Sequence[str]) -> list[tuple[str, str]]:
    count = 2 * len(ratios_of(config)) * (1 + len(students))
    ratios = ", ".join(f"{ratio:g}" for ratio in ratios_of(config))
    budget = "" if config.budget_minutes is None else f", none begun after {config.budget_minutes:g} minutes"
    return [
        ("source", f"{config.source}: {own}"),
        ("wanted", wanted_text(config)),
        ("networks", f"{', '.join((own, *students))}; {ratios} of their MACs; fp32 and int8"),
        ("candidates", f"{count}, the cheapest to train first{budget}"),
        ("training", f"{config.epochs} epochs each, {config.ranks} rank{'s' * (config.ranks > 1)}"),
        ("out", str(config.out)),
    ]


def _conclude(config: CompressConfig, source: Run, reference: Candidate, chain: Chain, found: _Search) -> Run:
    """Measure the finished files in turn, write the report, and copy the winner."""
    terminal = cli.context().terminal
    others = [candidate for candidate in found.measured if candidate != reference]
    try:
        bench = chain.bench([candidate.name for candidate in (reference, *others)])
    except FailedError as error:
        raise ModelError(f"{error}: the files are there, and not measured. Mend what it says above.") from error
    report = build_report(
        out=config.out,
        wanted={
            "max_drop": config.max_drop,
            "target_latency": config.target_latency,
            "source": str(source.path),
            "text": wanted_text(config),
        },
        finished={candidate: chain.history(candidate) for candidate in (reference, *others)},
        dropped=found.dropped,
        probed=found.probed,
        bench=bench,
        evaluation=EVALUATION,
        target=None if config.target_latency is None else latency_goal(config.target_latency),
    )
    write_report(config.out, report)
    terminal.grid(*shown_rows(report))
    for row in report["dropped"]:
        terminal.say(f"  {row['name']}: {row['reason']}")
    winner = next((row for row in report["candidates"] if row["winner"]), None)
    place = config.out / "winner"
    files = [str(config.out / name) for name in ("report.html", "report.png", "report.json")]
    if winner is None:
        with writing_in(config.out):
            if place.exists():
                remove_run(place)
        terminal.say(f"report: {', '.join(path for path in files if Path(path).exists())}")
        raise ModelError(report["conclusion"])
    _copy_run(config.out / winner["name"], place)
    low_high = accuracy_text({"value": winner["top1"], "interval": winner["interval"]})
    latency = ms_text(winner["p50_ms"] / 1000)
    rows = [
        ("winner", f"{winner['name']}: {latency}, {winner['speedup']:.2f}x as fast as the source"),
        ("Top-1", f"{low_high}, {100 * winner['difference']:+.2f} points"),
        *[("made by" if i == 0 else "", line) for i, line in enumerate(winner["commands"])],
        ("report", ", ".join(path for path in files if Path(path).exists())),
        ("run", str(place)),
        ("next", f"dsimg verify --source {place}"),
    ]
    terminal.table("result", rows)
    return Run.open(place)


def _copy_run(run: Path, place: Path) -> None:
    """Copy a run, whole or not at all, in place of what was there. Raises RunError."""
    if (place / "run.json").exists() and sha256(place / "run.json") == sha256(run / "run.json"):
        return
    beside = place.with_name(f".{place.name}.tmp")
    with writing_in(place.parent):
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(run, beside, ignore=shutil.ignore_patterns(".lock", "*.tmp"))
        if place.exists():
            remove_run(place)
        beside.rename(place)


if __name__ == "__main__":
    cli.run(compress)
