"""Whether training is healthy: steps without a finite gradient, jumps of the loss, ranks whose weights drift apart."""

import contextlib
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dsimg.engine import Engine, StepInfo
from dsimg.errors import DeviceError, DivergenceError, RunError
from dsimg.run import write_json

DRIFT_STEPS = 100  # optimizer steps between two comparisons of the ranks' weights
SPIKE_STEPS, SPIKE_FACTOR = 10, 2.0  # a loss of twice the mean of the ten before it (Lightning's spike detection)
SHOWN_IMAGES = 3


class Health:
    """Looks at each optimizer step. All ranks call the same methods at the same steps."""

    def __init__(self, engine: Engine, *, max_skipped: int, state: Mapping[str, Any] | None = None) -> None:
        """`state` is what `state` returned when the run was saved."""
        self._engine, self._max_skipped = engine, max_skipped
        self._skipped: int = state["skipped"] if state else 0
        self._losses = deque[float](state["losses"] if state else (), maxlen=SPIKE_STEPS)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to judge alike, as JSON."""
        return {"skipped": self._skipped, "losses": list(self._losses)}

    def spike(self, loss: float) -> float | None:
        """Return the mean loss of the steps before, where this step's `loss` is far above it; else None."""
        mean = sum(self._losses) / SPIKE_STEPS if len(self._losses) == SPIKE_STEPS else math.inf
        if math.isfinite(loss):
            self._losses.append(loss)
        return mean if math.isfinite(loss) and loss >= SPIKE_FACTOR * mean > 0 else None

    def skipped_too_often(self, info: StepInfo) -> bool:
        """Count a step whose gradient was not finite; tell whether they were more in a row than may be."""
        self._skipped = self._skipped + 1 if info.skipped else 0
        return self._skipped > self._max_skipped

    def divergence(
        self, step: int, again: Callable[[], tuple[float, list[str]]], report: Path, *, kept: str
    ) -> DivergenceError:
        """Find out where a step that was skipped went wrong, and return the error that says it.

        `again` repeats this rank's share of the step and returns its loss and the files in it. `kept` says which
        checkpoint stays. Rank 0 writes what each rank found into `report`.
        """
        with self._engine.largest_gradients() as largest:
            loss, images = again()
        name, value = max(largest.items(), key=lambda item: (not math.isfinite(item[1]), item[1]), default=("none", 0))
        found = self._engine.world.gather((loss, name, value, images))
        ranks = [
            {"rank": rank, "loss": str(loss), "parameter": name, "largest_gradient": str(value), "images": files}
            for rank, (loss, name, value, files) in enumerate(found)
        ]
        with contextlib.suppress(RunError):  # a full disk must not hide what happened
            self._engine.world.on_rank_zero(lambda: write_json(report, {"step": step, "ranks": ranks}))
        wrong = [rank for rank, (loss, _, value, _) in enumerate(found) if not math.isfinite(loss + value)]
        rank = wrong[0] if wrong else max(range(len(found)), key=lambda rank: found[rank][2])
        loss, name, value, files = found[rank]
        shown = ", ".join(files[:SHOWN_IMAGES])
        if len(files) > SHOWN_IMAGES:
            shown += f" and {len(files) - SHOWN_IMAGES} more"
        return DivergenceError(
            f"loss or gradient was not finite in {self._skipped} steps in a row, the last of them step {step}, more "
            f"than --max_skipped_steps {self._max_skipped}. On rank {rank} the loss was {loss:g}, the largest gradient "
            f"{value:g} in {name}, with the images {shown} (all of them in {report}). {kept} Lower --lr, clip "
            "gradients, or look at those images; then start anew with --overwrite, or from those weights."
        )

    def check_drift(self, step: int) -> None:
        """Compare the weights that all ranks hold alike. Raises DeviceError that names the first that differs."""
        world = self._engine.world
        if world.size == 1:
            return
        names, sums = self._engine.checksums()
        if not names:
            return
        # The largest and, negated, the smallest over the ranks: their sum is 0 where all are equal.
        extremes = world.maximum(torch.cat([sums, -sums]))
        differing = (extremes[: len(names)] + extremes[len(names) :]).nonzero().flatten().tolist()
        if not differing:
            return
        values = world.gather(int(sums[differing[0]]))
        ((usual, _),) = Counter(values).most_common(1)
        odd = [str(rank) for rank, value in enumerate(values) if value != usual]
        raise DeviceError(
            f"the ranks' weights have drifted apart: at step {step} {names[differing[0]]} is another on rank "
            f"{', '.join(odd)} than on the others ({len(differing)} of {len(names)} tensors differ). A faulty GPU or "
            "link, or a network that changes its own weights; the same command goes on from the last checkpoint."
        )
