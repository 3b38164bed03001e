"""Find the fastest network that is good enough: students, pruned and quantized, each tried by commands of dsimg.

dsimg compress --source RUN --data DIR --out DIR --max_drop 0.01 --target_latency 5ms

Every step is a command that is shown before it runs, and a run folder in --out. Latencies are measured before anything
is trained, then the candidates are tried from the cheapest on; one that cannot win any more is not trained.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsimg import cli
from dsimg.errors import ConfigError, ModelError, RunError
from dsimg.evaluation import find_split
from dsimg.folder import read_index
from dsimg.metrics import accuracy_text
from dsimg.recipe import latency_goal
from dsimg.run import Run, as_plain, hold_lock, read_json, sha256, write_json
from dsimg_export.commands import Command, Runner, run_command
from dsimg_export.cpu import processor_name
from dsimg_export.report import EQUAL, build_report, measured_files, points, shown_rows, write_report
from dsimg_export.search_space import (
    Candidate,
    Measured,
    Probed,
    default_students,
    in_order,
    network_name,
    read_probe,
    seconds_of,
    why_not,
)

STATE = "compress.json"
EVALUATION = Path("evaluations") / "compress"
LAST = "predictions.csv"  # of an evaluation, what is written last
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


@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """The flags of `dsimg compress`."""

    source: Path
    """The trained run to compress: the teacher of all that is tried."""
    data: str | None = None
    """The images to train, calibrate and measure with. Default: those that the source was trained on."""
    out: Path
    """The folder for the runs, report.html, report.json, report.png, and the run `winner`."""
    max_drop: float = 0.01
    """How far below the source's the winner's accuracy may be, 0.01 being one point."""
    target_latency: str | None = None
    """What the winner may take for one run here: a time (5ms), or a share of the source's in fp32 (0.5)."""
    students: tuple[str, ...] | None = None
    """Architectures to distil the source into. Default: the three smallest of its family that are smaller than it."""
    ratios: tuple[float, ...] = (1.0, 0.5, 0.25)
    """Shares of multiply-adds to prune the source and each student to; 1, the whole network, is always tried."""
    epochs: int = 20
    """Passes over the training images, of each distillation and after each pruning."""
    lr: float | None = None
    """Peak learning rate of distillation, for a global batch of 256. Default: that of `dsimg distill`."""
    prune_lr: float | None = None
    """The same after pruning. Default: --lr."""
    recipe: Path | None = None
    """A TOML file of further training flags, which distill and prune get as their --config."""
    deepspeed_config: str | None = None
    """A DeepSpeed JSON for the trainings: a path, or a name such as zero2."""
    ranks: int = 1
    """GPUs or processes that train together, on this machine."""
    round_to: int | None = None
    """Pruned widths stay multiples of this. Default: 8 for a cifar_resnet, 16 for others."""
    latency_batch: int = 1
    """Images a run of the session."""
    latency_threads: int = 1
    """Threads of the session."""
    budget_minutes: float | None = None
    """Start no further candidate after so many minutes of this start; what is running is finished."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop < 1:
            raise ConfigError(
                f"--max_drop is {self.max_drop}; it is a share of the images, such as 0.01 for one point."
            )
        if self.target_latency is not None:
            latency_goal(self.target_latency)
        if not self.ratios or not all(0 < ratio <= 1 for ratio in self.ratios):
            raise ConfigError(f"--ratios is {self.ratios}; give shares above 0 and at most 1.")
        for name in ("epochs", "ranks", "latency_batch", "latency_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("lr", "prune_lr", "budget_minutes"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"--{name} is {value}; it must be a positive number.")
        if self.round_to is not None and self.round_to < 1:
            raise ConfigError(f"--round_to is {self.round_to}; it must be at least 1.")


def compress(config: CompressConfig) -> Run:
    """Find the fastest network within --max_drop of a run's accuracy, by distilling, pruning and quantizing it."""
    return search(config, run=run_command)


class _FailedError(Exception):
    """A command of a candidate ended with an error, which it has shown; the message says which."""


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
    chain = _Chain(config, source, run)
    reference = Candidate(arch=own, ratio=1.0, precision="fp32")
    try:
        found = _Search(probed=chain.probe(students), floor=0.0, target=None)
        _check_students(config, found.probed)
        found.measured[reference] = first = chain.finish(reference)
    except _FailedError as error:
        raise ModelError(f"{error}, and nothing can be compared without it. Mend what it says above.") from error
    found.floor = first.accuracy - config.max_drop - EQUAL
    found.target = _target(config, seconds_of(reference, found.probed))
    terminal.say(f"good enough is Top-1 {found.floor:.2%}; the source has {first.accuracy:.2%}")
    for candidate in in_order(own, students, _ratios(config), found.probed):
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
            except _FailedError as error:
                reason = str(error)
                found.failed.add(candidate)
        if reason is None:
            terminal.say(f"{candidate.name}: Top-1 {found.measured[candidate].accuracy:.2%}")
        else:
            found.dropped[candidate] = reason
            terminal.say(f"{candidate.name}: dropped, {reason}")
    return _conclude(config, source, reference, chain, found)


class _Chain:
    """Makes runs in --out by commands, each once."""

    def __init__(self, config: CompressConfig, source: Run, run: Runner) -> None:
        self.config, self.source, self._run = config, source, run
        self.commands: dict[str, Command] = {}  # by the name of the folder that they make
        self.parents: dict[str, Path] = {}
        self._failed: dict[Command, str] = {}  # and how: several candidates may need the same
        self._files: set[str] | None = None  # that the first candidate, the source, was measured on
        self._side = source.model["preprocess"]["input_size"][1]

    def probe(self, students: Sequence[str]) -> dict[tuple[str, float], Probed]:
        """Return the latency of every network before it is trained, measured once, in turn. Raises _FailedError."""
        config = self.config
        flags: list[str] = ["--source", str(config.source)]
        flags += ["--students", *students] if students else []
        flags += ["--ratios", *(f"{ratio:g}" for ratio in _ratios(config))]
        flags += ["--round_to", str(self._round_to()), *self._session_flags()]
        # Named by what is asked: with other students or ratios everything is measured anew, in turn.
        # So it is on another processor.
        mark = hashlib.sha256(" ".join((*flags, processor_name())).encode()).hexdigest()[:6]
        path = config.out / f"probe-{mark}.json"
        command = Command("dsimg.probe", (*flags, "--out", str(path)))
        if not path.exists():
            self._do(command, makes=path)
        return read_probe(read_json(path))

    def has(self, candidate: Candidate) -> bool:
        """Tell whether a candidate is finished and evaluated."""
        return (self.config.out / candidate.name / EVALUATION / LAST).exists()

    def trained(self, candidate: Candidate) -> Measured | None:
        """Make the network of a candidate, and return what its training said of its accuracy. Raises _FailedError."""
        run = Run.open(self._network(candidate.arch, candidate.ratio))
        said = (run.manifest or {})["metrics"].get("validation")
        return None if said is None else _measured(said)

    def finish(self, candidate: Candidate) -> Measured:
        """Make the file of a candidate, and all that it is made of, and measure its accuracy. Raises _FailedError."""
        network = self._network(candidate.arch, candidate.ratio)
        file = self._make("export", f"{candidate.network}_fp32", network)
        if candidate.precision == "int8":
            file = self._make("quantize", candidate.name, file, *self._data_flags())
        place = file / EVALUATION
        if not (place / LAST).exists():
            command = Command("evaluate", ("--source", str(file), *self._data_flags(), "--out", str(place)))
            self._do(command, makes=place / LAST)
        files = measured_files(place / LAST)
        if self._files is None:
            self._files = files
        elif files != self._files:
            raise _FailedError("it was measured on other images than the source, and cannot be compared with it")
        return _measured(read_json(place / "evaluation.json"))

    def bench(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the measurement of these files in turn, the first being what ratios refer to. Raises _FailedError."""
        out = self.config.out
        path = out / "bench" / "bench.json"
        runs = [out / name for name in names]
        session = {"threads": self.config.latency_threads, "batch_size": self.config.latency_batch}
        if path.exists():
            kept = read_json(path)
            same = [entry["sha256"] for entry in kept["runs"]] == [sha256(one / "run.json") for one in runs]
            same = same and kept["machine"]["processor"] == processor_name()
            if same and all(kept["measurements"][0][key] == value for key, value in session.items()):
                return kept
        flags = ("--batch_sizes", str(session["batch_size"]), "--threads", str(session["threads"]))
        path.unlink(missing_ok=True)
        command = Command("bench", ("--source", *map(str, runs), *flags, "--out", str(path.parent)))
        self._do(command, makes=path)
        return read_json(path)

    def history(self, candidate: Candidate) -> list[str]:
        """Return the commands that lead from the source to a candidate."""
        lines: list[str] = []
        path = self.config.out / candidate.name
        while path != self.config.source:
            lines.append(str(self.commands[path.name]))
            path = self.parents[path.name]
        return lines[::-1]

    def _network(self, arch: str, ratio: float) -> Path:
        """Return the trained run of a network, which is made where it is not there."""
        config, own = self.config, arch == self.source.model["arch"]
        whole = self.config.source
        if not own:
            model = ("--model", arch, "--image_size", str(self._side))
            whole = self._make("distill", network_name(arch, 1.0), config.source, *model, *self._training(config.lr))
        if ratio == 1:
            return whole
        flags = ["--target_macs", f"{ratio:g}", "--round_to", str(self._round_to())]
        flags += [] if own else ["--teacher", str(config.source)]
        lr = config.lr if config.prune_lr is None else config.prune_lr
        return self._make("prune", network_name(arch, ratio), whole, *flags, *self._training(lr))

    def _training(self, lr: float | None) -> list[str]:
        config = self.config
        flags = [] if config.recipe is None else ["--config", str(config.recipe)]
        flags += self._data_flags()
        flags += [] if config.deepspeed_config is None else ["--deepspeed_config", config.deepspeed_config]
        return [*flags, "--epochs", str(config.epochs), *([] if lr is None else ["--lr", str(lr)])]

    def _data_flags(self) -> list[str]:
        return [] if self.config.data is None else ["--data", self.config.data]

    def _session_flags(self) -> list[str]:
        return [
            *("--latency_batch", str(self.config.latency_batch)),
            *("--latency_threads", str(self.config.latency_threads)),
        ]

    def _round_to(self) -> int:
        narrow = self.source.model["arch"].startswith("cifar_resnet")
        return self.config.round_to or (8 if narrow else 16)

    def _make(self, stage: str, name: str, parent: Path, *flags: str) -> Path:
        """Return the run of this name, finished, made from its parent by a stage."""
        path = self.config.out / name
        ranks = self.config.ranks if stage in ("distill", "prune") else 1
        command = Command(stage, ("--source", str(parent), *flags, "--out", str(path)), ranks)
        self.commands[name], self.parents[name] = command, parent
        if Run.state(path) != "finished":
            self._do(command, makes=path / "run.json")
        made_of = Run.open(path).manifest or {}
        if sha256(parent / "run.json") not in {one["sha256"] for one in made_of["parents"]}:
            raise RunError(
                f"{path} was made of another run than {parent} is now. Remove it, and the same command makes it anew."
            )
        return path

    def _do(self, command: Command, *, makes: Path) -> None:
        failure = self._failed.get(command)
        if failure is None:
            cli.context().terminal.say(f"\n$ {command}")
            code = self._run(command)
            if code:
                failure = (
                    f"{command.named} ended with exit code {code}"
                    if code > 0
                    else (f"{command.named} was ended by signal {-code}" + (" (out of memory?)" if code == -9 else ""))
                )
            elif not makes.exists():  # a launcher whose ranks were killed
                failure = f"{command.named} ended before {makes} was there"
        if failure is not None:
            self._failed[command] = failure
            raise _FailedError(failure)


def _measured(report: Mapping[str, Any]) -> Measured:
    """Return the accuracy in a report of `metrics.evaluation_report`'s form."""
    top1 = report["top1"]
    return Measured(accuracy=top1["value"], low=top1["interval"][0], high=top1["interval"][1])


def _open_source(config: CompressConfig) -> Run:
    source = Run.open(config.source)
    if not source.has("weights"):
        raise RunError(f"{config.source} has no weights to learn from. Give the trained run that it was made of.")
    out, place = config.out.resolve(), config.source.resolve()
    if out == place or place in out.parents:
        raise RunError(f"--out {config.out} lies in the source {config.source}. Choose another one.")
    return source


def _check_data(config: CompressConfig, source: Run) -> None:
    """Raise ConfigError where the source and what is trained here would be measured on different images."""
    if config.data is None:
        return
    folder = Path(config.data)
    if not folder.is_dir():
        raise ConfigError(
            f"--data {folder} is no folder. Leave it out for the images that {config.source} was trained on."
        )
    split, _ = find_split(source, config.data, source.model["classes"])
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
    try:
        if not state.exists():
            # What a kill between the lock and the state leaves is no stranger's.
            if out.exists() and (not out.is_dir() or any(not entry.name.startswith(".") for entry in out.iterdir())):
                raise RunError(f"--out {out} holds something other than a search. Choose another --out.")
            out.mkdir(parents=True, exist_ok=True)
        hold_lock(out)
    except OSError as error:
        raise RunError(f"cannot write in --out {out}: {error.strerror}. Choose another --out.") from error
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


def _ratios(config: CompressConfig) -> tuple[float, ...]:
    # As they are named and passed on, with six digits.
    return tuple(dict.fromkeys((1.0, *(float(f"{ratio:g}") for ratio in config.ratios))))


def _target(config: CompressConfig, source_seconds: float) -> float | None:
    if config.target_latency is None:
        return None
    value, is_seconds = latency_goal(config.target_latency)
    return value if is_seconds else value * source_seconds


def _plan_rows(config: CompressConfig, own: str, students: Sequence[str]) -> list[tuple[str, str]]:
    count = 2 * len(_ratios(config)) * (1 + len(students))
    ratios = ", ".join(f"{ratio:g}" for ratio in _ratios(config))
    budget = "" if config.budget_minutes is None else f", none begun after {config.budget_minutes:g} minutes"
    return [
        ("source", f"{config.source}: {own}"),
        ("wanted", _wanted_text(config)),
        ("networks", f"{', '.join((own, *students))}; {ratios} of their MACs; fp32 and int8"),
        ("candidates", f"{count}, the cheapest to train first{budget}"),
        ("training", f"{config.epochs} epochs each, {config.ranks} rank{'s' * (config.ranks > 1)}"),
        ("out", str(config.out)),
    ]


def _wanted_text(config: CompressConfig) -> str:
    wanted = f"the fastest that loses at most {points(config.max_drop)} of Top-1"
    if config.target_latency is None:
        return wanted
    value, is_seconds = latency_goal(str(config.target_latency))
    target = f"{1000 * value:g} ms" if is_seconds else f"{value:g} of the source's latency"
    return f"{wanted}, and takes at most {target}"


def _conclude(config: CompressConfig, source: Run, reference: Candidate, chain: _Chain, found: _Search) -> Run:
    """Measure the finished files in turn, write the report, and copy the winner."""
    terminal = cli.context().terminal
    others = [candidate for candidate in found.measured if candidate != reference]
    try:
        bench = chain.bench([candidate.name for candidate in (reference, *others)])
    except _FailedError as error:
        raise ModelError(f"{error}: the files are there, and not measured. Mend what it says above.") from error
    report = build_report(
        out=config.out,
        wanted={
            "max_drop": config.max_drop,
            "target_latency": config.target_latency,
            "source": str(source.path),
            "text": _wanted_text(config),
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
        _remove(place)
        terminal.say(f"report: {', '.join(path for path in files if Path(path).exists())}")
        raise ModelError(report["conclusion"])
    _copy_run(config.out / winner["name"], place)
    low_high = accuracy_text({"value": winner["top1"], "interval": winner["interval"]})
    rows = [
        ("winner", f"{winner['name']}: {winner['p50_ms']:.3g} ms, {winner['speedup']:.2f}x as fast as the source"),
        ("Top-1", f"{low_high}, {100 * winner['difference']:+.2f} points"),
        *[("made by" if i == 0 else "", line) for i, line in enumerate(winner["commands"])],
        ("report", ", ".join(path for path in files if Path(path).exists())),
        ("run", str(place)),
        ("next", f"dsimg verify --source {place}"),
    ]
    terminal.table("result", rows)
    return Run.open(place)


def _copy_run(run: Path, place: Path) -> None:
    """Copy a run, whole or not at all, in place of what was there."""
    if (place / "run.json").exists() and sha256(place / "run.json") == sha256(run / "run.json"):
        return
    beside = place.with_name(f".{place.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(run, beside, ignore=shutil.ignore_patterns(".lock", "*.tmp"))
    _remove(place)
    beside.rename(place)


def _remove(place: Path) -> None:
    """Remove a run. It is renamed first: a kill meanwhile must not leave half of one."""
    aside = place.with_name(f".{place.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if place.exists():
        place.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


if __name__ == "__main__":
    cli.run(compress)
