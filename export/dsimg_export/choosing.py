"""How a network is quantized: which ranges, and which layers stay in float, decided by what was measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsimg import cli
from dsimg.errors import ModelError
from dsimg.evaluation import Evaluation
from dsimg.folder import Split
from dsimg.machine import int8_is_exact
from dsimg.preprocess import Preprocess
from dsimg_export.comparison import accuracy_drop
from dsimg_export.measuring import Answer, evaluate_sessions
from dsimg_export.samples import Samples
from dsimg_export.sensitivity import fewest, together
from dsimg_export.served import logits_of
from dsimg_export.session import latency, open_session
from dsimg_export.trials import Candidates, Images, Trial, Way, read_images

TRIES = 3  # numbers of layers in float that are measured in one reading of the reported images

Named = tuple[str, tuple[str, ...]]  # a file by its role, or "fp32", and its layers in float
FP32: Named = ("fp32", ())


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
        Raises ModelError where fp32 gives NaN or infinity: nothing could be compared with that.
        """
        terminal = cli.context().terminal
        images = read_images(self._choosing, self._preprocess)
        count = len(images.labels)
        fp32 = self._candidates.trial(None, images)
        finite = np.isfinite(fp32.logits).all(axis=1)
        if not finite.all():
            raise ModelError(
                f"{self._candidates.source} gives NaN or infinity on {count - int(finite.sum()):,} of {count:,} images "
                "in fp32, with which int8 cannot be compared. Train the network again, then export it."
            )
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
                "loss": trial.loss if math.isfinite(trial.loss) else None,
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
        found = self._searched(
            choice,
            [role_of_this_machine()],
            lambda asked: {file: drop(self._candidates.trial(best, images, in_float=file[1])) for file in asked},
            at_once=1,
        )
        return self._with_layers(choice, found)

    def write(self, choice: Choice, files: Mapping[str, Path]) -> tuple[dict[str, Evaluation], Choice]:
        """Write the int8 files by role and return what they and fp32 say of the validation images, and the choice as it
        is in the end.

        Where a file loses more than `max_drop` there, more layers go back to float: which, is known from the images
        that choose; how many, is then decided on the images that are reported, and the choice says so.
        """
        here = role_of_this_machine()
        # The 8-bit file's sums would saturate on a processor that needs the other, and say nothing of those it is for.
        roles = ("model", "reduced") if here == "model" else ("reduced",)
        begun = choice.in_float[here]
        choice = replace(choice, in_float=dict.fromkeys(("model", "reduced"), begun), missed=())
        seen = self._measured(choice.way, [FP32, *((role, begun) for role in roles)])

        def drops_of(asked: Sequence[Named]) -> dict[Named, float]:
            seen.update(self._measured(choice.way, asked))
            return {file: accuracy_drop(seen[FP32], seen[file]) for file in asked}

        over = [role for role in roles if accuracy_drop(seen[FP32], seen[role, begun]) > self._max_drop]
        if over:
            if not choice.sensitivity:
                choice = self._ranked(choice, read_images(self._choosing, self._preprocess))
            choice = self._with_layers(choice, self._searched(choice, over, drops_of, at_once=TRIES))
            choice = replace(choice, flattered=tuple(role for role in over if choice.in_float[role] != begun))
        if here == "reduced":  # what is not measured has the same layers in float
            choice = replace(choice, in_float=dict.fromkeys(("model", "reduced"), choice.in_float["reduced"]))
        for role, file in files.items():
            self._write((role, choice.in_float[role]), choice.way, file)
        return {"fp32": seen[FP32], **{role: seen[role, choice.in_float[role]] for role in roles}}, choice

    def _searched(
        self,
        choice: Choice,
        roles: Sequence[str],
        drops_of: Callable[[Sequence[Named]], Mapping[Named, float]],
        *,
        at_once: int,
    ) -> dict[str, tuple[str, ...] | None]:
        """Return by role the fewest more layers in float, worst first, that bring the drop down to `max_drop`; None
        where half of the layers do not. drops_of: measures several files; at_once: how many of a role at a time."""
        terminal = cli.context().terminal
        ranking = tuple(name for name, _ in choice.sensitivity)

        def measured(asked: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[float]]:
            numbers = sorted({number for some in asked.values() for number in some})
            terminal.progress(f"measuring with {', '.join(map(str, numbers))} of {len(ranking)} layers in float")
            drops = drops_of([(role, ranking[:number]) for role, some in asked.items() for number in some])
            return {role: [drops[role, ranking[:number]] for number in some] for role, some in asked.items()}

        limit = max(len(ranking) // 2, 1)
        searches = {
            role: fewest(limit, max_drop=self._max_drop, start=len(choice.in_float[role]), at_once=at_once)
            for role in roles
        }
        found = together(searches, measured)
        terminal.stop_live()
        return {role: None if number is None else ranking[:number] for role, number in found.items()}

    @staticmethod
    def _with_layers(choice: Choice, found: Mapping[str, tuple[str, ...] | None]) -> Choice:
        """Return the choice with the layers in float that were found; where none were, with those of before, and the
        role marked as missed."""
        good = {role: names for role, names in found.items() if names is not None}
        missed = tuple(role for role in found if role not in good)
        return replace(choice, in_float={**choice.in_float, **good}, missed=missed)

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

    def _measured(self, way: Way, files: Sequence[Named]) -> dict[Named, Evaluation]:
        """Return what several files say of the validation images, each of which is decoded once for all of them."""
        answers: dict[str, Answer] = {}
        for place, file in enumerate(files):
            path = self._candidates.folder / f"measured_{place}.onnx"
            if file == FP32:
                path = self._candidates.source
            else:
                self._write(file, way, path)
            answers[str(place)] = self._answer(path)
        found = evaluate_sessions(
            answers, split=self._samples.validation, preprocess=self._preprocess, classes=self._classes
        )
        return {file: found[str(place)] for place, file in enumerate(files)}

    def _write(self, file: Named, way: Way, path: Path) -> None:
        role, in_float = file
        self._candidates.write(way, path, in_float=in_float, reduce_range=role == "reduced")

    def _answer(self, path: Path) -> Answer:
        session = open_session(path, threads=self._threads)
        return lambda pixels: logits_of(session, pixels, self._preprocess)

    def _fastest(self, ways: Sequence[Way]) -> Way:
        if len(ways) == 1:
            return ways[0]
        files = {way: self._candidates.folder / f"{way}.onnx" for way in ways}
        for way, file in files.items():
            self._candidates.write(way, file)
        times = latency({str(way): file for way, file in files.items()}, input_size=self._preprocess.input_size)
        return min(ways, key=lambda way: times[way].cpu)
