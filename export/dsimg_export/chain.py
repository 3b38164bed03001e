"""The runs of a search, each made once by a command that a user could type, and found again when the search goes on."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsimg import cli
from dsimg.errors import RunError
from dsimg.evaluation import read_predictions
from dsimg.machine import processor_name
from dsimg.run import Run, read_json, sha256
from dsimg_export.commands import Command, Runner
from dsimg_export.search_space import Candidate, Measured, Probed, network_name, read_probe
from dsimg_export.wanted import CompressConfig, ratios_of

EVALUATION = Path("evaluations") / "compress"
LAST = "predictions.csv"  # of an evaluation, what is written last


class FailedError(Exception):
    """A command of a candidate ended with an error, which it has shown; the message says which."""


class Chain:
    """Makes runs in --out by commands, each once."""

    def __init__(self, config: CompressConfig, source: Run, run: Runner) -> None:
        self.config, self.source, self._run = config, source, run
        self.commands: dict[str, Command] = {}  # by the name of the folder that they make
        self.parents: dict[str, Path] = {}
        self._failed: dict[Command, str] = {}  # and how: several candidates may need the same
        self._files: set[str] | None = None  # that the first candidate, the source, was measured on
        self._side = source.model["preprocess"]["input_size"][1]

    def probe(self, students: Sequence[str]) -> dict[tuple[str, float], Probed]:
        """Return the latency of every network before it is trained, measured once, in turn. Raises FailedError."""
        config = self.config
        flags: list[str] = ["--source", str(config.source)]
        flags += ["--students", *students] if students else []
        flags += ["--ratios", *(f"{ratio:g}" for ratio in ratios_of(config))]
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
        """Make the network of a candidate, and return what its training said of its accuracy. Raises FailedError."""
        run = Run.open(self._network(candidate.arch, candidate.ratio))
        assert run.manifest is not None
        said = run.manifest["metrics"].get("validation")
        return None if said is None else _measured(said)

    def finish(self, candidate: Candidate) -> Measured:
        """Make the file of a candidate, and all that it is made of, and measure its accuracy. Raises FailedError."""
        network = self._network(candidate.arch, candidate.ratio)
        file = self._make("export", f"{candidate.network}_fp32", network)
        if candidate.precision == "int8":
            file = self._make("quantize", candidate.name, file, *self._data_flags())
        place = file / EVALUATION
        if not (place / LAST).exists():
            command = Command("evaluate", ("--source", str(file), *self._data_flags(), "--out", str(place)))
            self._do(command, makes=place / LAST)
        files = set(read_predictions(place / LAST))
        if self._files is None:
            self._files = files
        elif files != self._files:
            raise FailedError("it was measured on other images than the source, and cannot be compared with it")
        return _measured(read_json(place / "evaluation.json"))

    def bench(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the measurement of these files in turn, the first being what ratios refer to. Raises FailedError."""
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
        made = Run.open(path).manifest
        assert made is not None
        if sha256(parent / "run.json") not in {one["sha256"] for one in made["parents"]}:
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
            raise FailedError(failure)


def _measured(report: Mapping[str, Any]) -> Measured:
    """Return the accuracy in a report of `metrics.evaluation_report`'s form."""
    top1 = report["top1"]
    return Measured(accuracy=top1["value"], low=top1["interval"][0], high=top1["interval"][1])
