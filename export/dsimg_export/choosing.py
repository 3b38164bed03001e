"""How a network is quantized: which ranges, and which layers stay in float, decided by what was measured."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsimg import cli
from dsimg.evaluation import Evaluation
from dsimg.folder import Split
from dsimg.preprocess import Preprocess
from dsimg_export.comparison import accuracy_drop
from dsimg_export.cpu import int8_is_exact
from dsimg_export.measuring import Answer, evaluate_sessions
from dsimg_export.samples import Samples
from dsimg_export.sensitivity import fewest
from dsimg_export.served import logits_of
from dsimg_export.session import latency, open_session
from dsimg_export.trials import Candidates, Images, Trial, Way, read_images


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How a network is quantized, and on what grounds."""

    way: Way
    trials: Mapping[str, Mapping[str, Any]]  # of fp32 and of each way: what it said of the images that choose
    chosen_on: str
    in_float: Mapping[str, tuple[str, ...]]  # layers, by the role of the file
    sensitivity: tuple[tuple[str, float], ...] = ()  # of layers, worst first; empty where nothing had to be put back
    missed: tuple[str, ...] = ()  # roles of files that lose more than was allowed whatever was put back
    flattered: tuple[str, ...] = ()  # roles whose number of layers in float was decided on the reported images


def role_of_this_machine() -> str:
    """Return the role of the int8 file that this processor runs as it was meant."""
    return "model" if int8_is_exact() else "reduced"


class Chooser:
    """Chooses among the ways of quantizing a network, and writes the files."""

    def __init__(
        self,
        candidates: Candidates,
        samples: Samples,
        *,
        preprocess: Preprocess,
        classes: Sequence[str],
        max_drop: float,
        threads: int,
    ) -> None:
        """max_drop: of the accuracy, 0..1."""
        self._candidates = candidates
        self._samples = samples
        self._preprocess = preprocess
        self._classes = classes
        self._max_drop = max_drop
        self._threads = threads

    def choose(self, ways: Sequence[Way]) -> Choice:
        """Return the way of quantizing that is best on the images that choose, with the layers that must be in float.

        That is the one with most images right, then the most answers that fp32 gives, then the least loss. `dynamic`
        is measured against the best of the others: of those that lose no more than `max_drop`, the faster is taken.
        """
        terminal = cli.context().terminal
        images = read_images(self._choosing, self._preprocess)
        count = len(images.labels)
        fp32 = self._candidates.trial(None, images)
        trials: dict[Way, Trial] = {}
        for way in ways:
            terminal.progress(f"trying {way}")
            trials[way] = self._candidates.trial(way, images)
        terminal.stop_live()

        def merit(way: Way) -> tuple[float, ...]:
            return trials[way].correct, trials[way].agreement(fp32), -trials[way].loss

        def drop(trial: Trial) -> float:
            lost: int = fp32.correct - trial.correct
            return lost / count

        def described(trial: Trial) -> dict[str, Any]:
            return {
                "correct": trial.correct,
                "images": count,
                "agreement": trial.agreement(fp32),
                "loss": trial.loss,
            }

        best: Way = max((way for way in ways if way != "dynamic"), key=merit)
        if "dynamic" in ways:
            rivals: tuple[Way, ...] = (best, "dynamic")
            good = [way for way in rivals if drop(trials[way]) <= self._max_drop]
            best = self._fastest(good) if good else max(rivals, key=merit)
        whose = "images apart from calibration and report" if self._samples.choosing.files else "of the reported images"
        choice = Choice(
            way=best,
            trials={"fp32": described(fp32), **{str(way): described(trial) for way, trial in trials.items()}},
            chosen_on=f"{count:,} {whose}",
            in_float={role_of_this_machine(): ()},
        )
        if drop(trials[best]) <= self._max_drop:
            return choice
        choice = self._ranked(choice, images)
        return self._put_back(
            choice,
            role_of_this_machine(),
            lambda names: drop(self._candidates.trial(best, images, in_float=names)),
        )

    def write(self, choice: Choice, files: Mapping[str, Path]) -> tuple[dict[str, Evaluation], Choice]:
        """Write the int8 files by role and return what they and fp32 say of the validation images, and the choice as it
        is in the end.

        Where a file loses more than `max_drop` there, more layers go back to float: which, is known from the images
        that choose; how many, is then decided on the images that are reported, and the choice says so.
        """
        here = role_of_this_machine()
        fp32 = self._measured(self._candidates.source)
        measured = {"fp32": fp32}
        # The 8-bit file's sums would saturate on a processor that needs the other, and say nothing of those it is for.
        for role in ("model", "reduced") if here == "model" else ("reduced",):
            measured[role], choice = self._write_one(choice, role, files[role], fp32)
        if "model" not in measured:
            choice = replace(choice, in_float={**choice.in_float, "model": choice.in_float[here]})
            self._candidates.write(choice.way, files["model"], in_float=choice.in_float["model"], reduce_range=False)
        return measured, choice

    def _write_one(self, choice: Choice, role: str, file: Path, fp32: Evaluation) -> tuple[Evaluation, Choice]:
        start = choice.in_float.get(role, choice.in_float[role_of_this_machine()])
        choice = replace(choice, in_float={**choice.in_float, role: start})

        def evaluated(names: Sequence[str]) -> Evaluation:
            self._candidates.write(choice.way, file, in_float=names, reduce_range=role == "reduced")
            return self._measured(file)

        found = evaluated(start)
        if accuracy_drop(fp32, found) <= self._max_drop:
            return found, replace(choice, missed=tuple(name for name in choice.missed if name != role))
        if not choice.sensitivity:
            choice = self._ranked(choice, read_images(self._choosing, self._preprocess))
        choice = self._put_back(choice, role, lambda names: accuracy_drop(fp32, evaluated(names)))
        if choice.in_float[role] != start:
            choice = replace(choice, flattered=(*choice.flattered, role))
        return evaluated(choice.in_float[role]), choice

    def _put_back(self, choice: Choice, role: str, drop_with: Callable[[Sequence[str]], float]) -> Choice:
        """Return the choice with the fewest more layers in float that bring the drop down to `max_drop`, or, where half
        of the layers do not, with those of before and the role marked as missed."""
        terminal = cli.context().terminal
        names = [name for name, _ in choice.sensitivity]

        def drop_at(number: int) -> float:
            terminal.progress(f"measuring with {number} of {len(names)} layers in float")
            return drop_with(names[:number])

        found = fewest(max(len(names) // 2, 1), drop_at, max_drop=self._max_drop, start=len(choice.in_float[role]))
        terminal.stop_live()
        missed = tuple(name for name in choice.missed if name != role)
        if found is None:
            return replace(choice, missed=(*missed, role))
        return replace(choice, in_float={**choice.in_float, role: tuple(names[:found])}, missed=missed)

    @property
    def _choosing(self) -> Split:
        return self._samples.choosing if self._samples.choosing.files else self._samples.validation

    def _ranked(self, choice: Choice, images: Images) -> Choice:
        terminal = cli.context().terminal
        ranking = self._candidates.sensitivity(
            choice.way, images, lambda layer: terminal.progress(f"measuring what int8 does to {layer}")
        )
        terminal.stop_live()
        return replace(choice, sensitivity=tuple(ranking))

    def _measured(self, file: Path) -> Evaluation:
        session = open_session(file, threads=self._threads)
        answer: Answer = lambda pixels: logits_of(session, pixels, self._preprocess)  # noqa: E731
        found = evaluate_sessions(
            {"": answer}, split=self._samples.validation, preprocess=self._preprocess, classes=self._classes
        )
        return found[""]

    def _fastest(self, ways: Sequence[Way]) -> Way:
        if len(ways) == 1:
            return ways[0]
        with tempfile.TemporaryDirectory(prefix="dsimg-") as folder:
            files = {way: Path(folder) / f"{way}.onnx" for way in ways}
            for way, file in files.items():
                self._candidates.write(way, file)
            times = latency({str(way): file for way, file in files.items()}, input_size=self._preprocess.input_size)
        return min(ways, key=lambda way: times[way].cpu)
