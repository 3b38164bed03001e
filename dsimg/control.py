"""What happens between optimizer steps: the ranks agree, the run is recorded, checked, saved and, on request, ended.

After each step one small all-reduce tells every rank what any of them knows: the loss, images that cannot be decoded,
who was asked to stop, whether it is time to save, and whether the last save is on the disk. It runs beside the next
step and is read at its end, so that nobody waits for it.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsimg.checkpoint import Saver
from dsimg.console import Terminal
from dsimg.engine import Engine, StepInfo
from dsimg.errors import RunError, StopRequested
from dsimg.health import DRIFT_STEPS, Health
from dsimg.meter import Meter
from dsimg.stop import REASONS, StopWatch, reason_text
from dsimg.watch import EVALUATING, RankWatch

SAVING = "saving"  # how long that takes depends on the disk: it is no hang


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run is: `epoch` epochs are done, and `epoch_step` optimizer steps of the next; `step` in all."""

    epoch: int = 0
    epoch_step: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When this start of a run saves and ends."""

    save_minutes: float
    max_steps: int | None
    max_hours: float | None
    stop_file: Path | None
    grace_seconds: float
    bad_images: int


@dataclass(frozen=True)
class _Told:
    """What all ranks know after an exchange."""

    loss: float  # summed over the ranks
    bad_images: int
    save: bool  # it is time to
    written: bool  # the save that has begun lies on every rank's disk
    stop: str | None  # one of REASONS


@dataclass(frozen=True)
class _Pending:
    """An optimizer step whose exchange nobody has waited for yet."""

    position: Position
    info: StepInfo
    again: Callable[[], tuple[float, list[str]]]
    ended: float  # time.perf_counter()
    exchange: Callable[[], Tensor]


class Control:
    """Takes care of the run at each step boundary. All ranks call the same methods at the same steps."""

    def __init__(
        self,
        engine: Engine,
        *,
        start: Position,
        limits: Limits,
        meter: Meter,
        health: Health,
        saver: Saver,
        state: Callable[[Position], dict[str, Any]],
        count_bad_images: Callable[[], int],
        too_many_bad_images: Callable[[], None],
        divergence_file: Path,
        stop: StopWatch,
        watch: RankWatch | None,
        terminal: Terminal,
    ) -> None:
        """`state` returns what a checkpoint of a position holds, as JSON. `too_many_bad_images` counts those of all
        ranks exactly and raises when they are too many; it is called as soon as they may be."""
        self._engine, self._start, self._limits = engine, start, limits
        self._meter, self._health, self._saver, self._state = meter, health, saver, state
        self._count_bad_images, self._too_many_bad_images = count_bad_images, too_many_bad_images
        self._divergence_file = divergence_file
        self._stop, self._watch, self._terminal = stop, watch, terminal
        self._asked: str | None = None
        self._save_due = False
        self._pending: _Pending | None = None
        self._saved_at = time.monotonic()
        self._tried = self._told_cost = self._warned = False
        self._step_seconds, self._step_begun = 0.0, time.perf_counter()

    def begin_epoch(self) -> None:
        """Training goes on: from now on there is something to save before leaving."""
        self._stop.nothing_to_save = False
        self._step_begun = time.perf_counter()

    def at(self, position: Position, doing: str) -> None:
        """Tell the other ranks' watches where this one is."""
        if self._watch is not None:
            self._watch.at(position.step, doing)

    def after_step(
        self,
        position: Position,
        info: StepInfo,
        loss: Tensor,
        *,
        last: bool,
        again: Callable[[], tuple[float, list[str]]],
    ) -> None:
        """Record the optimizer step that led to `position`, with this rank's summed `loss`; save and stop when asked.

        At the `last` step of an epoch that is left to `end_of_epoch`. `again` repeats the step's backward pass and
        returns its loss, for a diagnosis. Raises StopRequested, and what ends a run that is not healthy: a step later
        than it happened, since nobody waits for the exchange.
        """
        self._settle()
        self._pending = _Pending(position, info, again, time.perf_counter(), self._exchange(loss))
        if position.step > self._start.step + 1:  # the first one has the warm-up of many things in it
            self._step_seconds = max(self._step_seconds, self._pending.ended - self._step_begun)
        # Early, to know that the disk takes it, and how long.
        first = not self._tried and self._saver.saved_step is None
        if position.step - self._start.step == self._limits.max_steps:
            self._asked = self._asked or "max_steps"
        if last or first or self._save_due or self._asked:
            self._settle()
        if not last and (first or self._save_due or self._asked):
            self._save(position)
        elif not last and position.step % DRIFT_STEPS == 0:
            self._health.check_drift(position.step)
        if not last and self._asked:
            self._leave(position)
        self._step_begun = time.perf_counter()

    def _settle(self) -> None:
        """Act on what the ranks told one another after the last step."""
        step, self._pending = self._pending, None
        if step is None:
            return
        position = step.position
        told = self._read(step.exchange)
        # Weights make each micro-batch's loss world * accumulation times its part of the step's mean (steps.StepPlan).
        mean = told.loss / (self._engine.world.size * self._engine.accumulation)
        spike = self._health.spike(mean)
        self._meter.step(step.info, mean, epoch=position.epoch, step=position.step, ended=step.ended, spike=spike)
        if told.bad_images > self._limits.bad_images:
            self._too_many_bad_images()
        if self._health.skipped_too_often(step.info):
            with contextlib.suppress(RunError):  # a full disk must not hide what happened
                self._finish_save(position)
            saved = self._saver.saved_step
            kept = "There is no checkpoint." if saved is None else f"The checkpoint of step {saved} stays."
            raise self._health.divergence(position.step, step.again, self._divergence_file, kept=kept)
        self._save_due = told.save
        self._asked = self._asked or told.stop
        if told.written:
            begun = time.perf_counter()
            self._finish_save(position)
            self._meter.pause(time.perf_counter() - begun)

    def end_of_epoch(self, position: Position) -> None:
        """Save at an epoch's end, whose `position` has `epoch_step` 0; stop when asked."""
        self._engine.pool_batchnorm()
        self._save(position)
        if self._asked:
            self._leave(position)

    def evaluating(self, position: Position) -> None:
        """Between two batches of an evaluation: stop when any rank was asked to. Raises StopRequested."""
        self.at(position, EVALUATING)
        if not self._stop.nothing_to_save:
            told = self._read(self._exchange(torch.zeros((), device=self._engine.world.device)))
            if told.written:
                self._finish_save(position)
            self._asked = told.stop
            if self._asked:
                self._leave(position)

    def end(self, position: Position) -> None:
        """The last epoch is done: have its checkpoint on the disk before the run's files are written."""
        self.at(position, SAVING)
        self._finish_save(position)

    def _exchange(self, loss: Tensor) -> Callable[[], Tensor]:
        """Start to tell the other ranks what this one knows."""
        world, saver, reason = self._engine.world, self._saver, self._stop.reason
        due = time.monotonic() - self._saved_at >= 60 * self._limits.save_minutes
        save = world.rank == 0 and due and not saver.busy
        asked = [float(why == reason) for why in REASONS]
        known = [float(self._count_bad_images()), float(save), float(saver.written), *asked]
        mine = torch.tensor(known, dtype=torch.float64).to(loss.device, non_blocking=True)
        return world.sum_later(torch.cat([loss.detach().double().reshape(1), mine]))

    def _read(self, exchange: Callable[[], Tensor]) -> _Told:
        loss, bad_images, save, written, *asked = exchange().tolist()
        stop = next((why for why, ranks in zip(REASONS, asked, strict=True) if ranks), None)
        return _Told(loss, round(bad_images), save > 0, written == self._engine.world.size, stop)

    def _save(self, position: Position) -> None:
        """Start to save, after the weights that should be equal on all ranks were compared."""
        begun = time.perf_counter()
        self.at(position, SAVING)
        self._finish_save(position)
        self._health.check_drift(position.step)
        self._saver.begin(self._state(position))
        self._tried, self._save_due = True, False
        self._saved_at = time.monotonic()
        self._meter.pause(time.perf_counter() - begun)

    def _finish_save(self, position: Position) -> None:
        if not self._saver.busy:
            return
        self.at(position, SAVING)
        saves = self._saver.saves
        self._saver.finish()
        if self._saver.saves == saves:
            return
        self._meter.saved(self._saver, epoch=position.epoch, step=position.step)
        self._tell_cost()

    def _tell_cost(self) -> None:
        """Hold what a save takes against the time that launchers give between asking to stop and killing."""
        saver, grace = self._saver, self._limits.grace_seconds
        if not self._told_cost:
            self._told_cost = True
            self._terminal.say(
                f"checkpoint  {saver.cost_text()}; it held training up for {saver.paused:.2f} s  (grace {grace:g} s)"
            )
        needed = self._step_seconds + saver.write_seconds
        if needed > grace and not self._warned:
            self._warned = True
            self._terminal.warn(
                f"a step and a save take {needed:.0f} s together, more than the {grace:g} s of --grace_seconds that a "
                "launcher may give after asking to stop: what came after the last checkpoint would be lost. Ask "
                "earlier (--max_hours, --stop_file), or save more often (--save_minutes)."
            )

    def _leave(self, position: Position) -> None:
        assert self._asked is not None
        self._finish_save(position)
        saved = self._saver.saved_step
        where = f"saved at step {saved}" if saved is not None else "nothing was saved"
        if saved is not None and saved != position.step:
            where = f"the last checkpoint is that of step {saved}"
        limits = self._limits
        why = reason_text(self._asked, stop_file=limits.stop_file, max_hours=limits.max_hours)
        if self._asked == "max_steps":
            why = f"--max_steps {limits.max_steps}"
        raise StopRequested(f"stopped by {why} after step {position.step}; {where}. The same command goes on from it.")
