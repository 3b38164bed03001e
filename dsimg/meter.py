"""What training shows and records: the live line, `metrics.jsonl` and DeepSpeed's monitors, fed from one place."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsimg.console import Terminal, count_text, duration_text
from dsimg.engine import Engine, StepInfo
from dsimg.errors import RunError
from dsimg.run import write_atomically


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, written by rank 0.

    Opened again after a stop, it is cut back to the step that training resumes from, so that no step stands twice.
    """

    def __init__(self, path: Path, *, step: int, rank: int) -> None:
        self._path = path
        self._rank = rank
        if rank == 0:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
            kept = "".join(f"{line}\n" for line in lines if _step_of(line) <= step)
            write_atomically(path, kept.encode("utf-8"))

    def add(self, **values: Any) -> None:
        """Append one line. NaN and infinity, which JSON lacks, are written as text."""
        if self._rank == 0:
            plain = {
                key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in values.items()
            }
            try:
                with self._path.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(plain) + "\n")
            except OSError as error:
                raise RunError(
                    f"cannot write {self._path}: {error.strerror}. The same command goes on from the last checkpoint."
                ) from error


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line that was being written when the process ended


class Meter:
    """Collects what a logged step says; the losses stay on the device until then."""

    def __init__(
        self,
        engine: Engine,
        *,
        steps_per_epoch: int,
        images_per_epoch: int,
        batch_size: int,
        epochs: int,
        start_step: int,
        log_steps: int,
        file: MetricsFile,
        terminal: Terminal,
    ) -> None:
        self._engine = engine
        self._steps_per_epoch, self._images_per_epoch, self._batch_size = (
            steps_per_epoch,
            images_per_epoch,
            batch_size,
        )
        self._epochs, self._log_steps = epochs, log_steps
        self._file, self._terminal = file, terminal
        self._losses: list[Tensor] = []
        self._waited = 0.0
        self._first_step = self._logged_step = start_step
        self._paused = 0.0
        self._begun = self._since = time.perf_counter()

    def waited(self, seconds: float) -> None:
        """Add time that was spent waiting for data."""
        self._waited += seconds

    def micro_batch(self, loss: Tensor) -> None:
        """Add a micro-batch's weighted loss, a scalar on the device."""
        self._losses.append(loss.detach())

    def step(self, info: StepInfo, *, epoch: int, step: int, bad_images: int) -> int | None:
        """Count optimizer step `step`, the first being 1. On a logged one, agree with the other ranks, write and show
        it, and return the number of undecodable images that all ranks met so far; else return None."""
        last = step % self._steps_per_epoch == 0
        if not (last or step % self._log_steps == 0 or info.skipped):
            return None
        engine = self._engine
        local = torch.stack(
            [
                torch.stack(self._losses).sum().double(),
                torch.tensor(bad_images).double().to(engine.world.device),
            ]
        )
        summed: list[float] = engine.world.sum(local).tolist()
        steps = step - self._logged_step
        # Weights make each micro-batch's loss world * accumulation times its part of the step's mean (steps.StepPlan).
        loss = summed[0] / (engine.world.size * engine.accumulation * steps)
        now = time.perf_counter()
        seconds = now - self._since
        elapsed = now - self._begun - self._paused
        values: dict[str, float] = {
            "loss": loss,
            "lr": info.lr,
            "grad_norm": info.grad_norm,
            "images_per_second": (self._images(step) - self._images(self._logged_step)) / seconds,
            "data_wait": self._waited / seconds,
        }
        self._file.add(
            kind="train",
            step=step,
            epoch=epoch,
            **values,
            loss_scale=info.loss_scale,
            skipped_steps=engine.skipped_steps,
            peak_memory_bytes=engine.peak_memory(),
            seconds=elapsed,
        )
        engine.write_monitor({f"Train/{name}": value for name, value in values.items()}, samples=self._images(step))
        remaining = (self._epochs * self._steps_per_epoch - step) * elapsed / (step - self._first_step)
        text = (
            f"epoch {epoch + 1}/{self._epochs}  step {step}  loss {loss:.4f}  lr {values['lr']:.3g}  "
            f"|grad| {info.grad_norm:.3g}  {count_text(values['images_per_second'])} images/s  "
            f"data wait {values['data_wait']:.0%}  ETA {duration_text(remaining)}"
        )
        if engine.skipped_steps:
            text += f"  skipped steps {engine.skipped_steps}"
        self._terminal.progress(text, last=last)
        self._losses.clear()
        self._waited, self._logged_step, self._since = 0.0, step, time.perf_counter()
        return round(summed[1])

    def evaluated(self, report: dict[str, Any], *, epoch: int, step: int) -> None:
        """Record an evaluation after `epoch` epochs."""
        values = {"top1": report["top1"]["value"], "loss": report["loss"]}
        if report["top5"] is not None:
            values["top5"] = report["top5"]["value"]
        self._file.add(kind="validation", step=step, epoch=epoch, **values)
        self._engine.write_monitor(
            {f"Validation/{name}": value for name, value in values.items()}, samples=self._images(step)
        )

    def pause(self, seconds: float) -> None:
        """Leave out time that evaluation and saving took: images/s and ETA are the training's."""
        self._paused += seconds
        self._since += seconds

    def _images(self, step: int) -> int:
        """Return how many training images the first `step` steps saw."""
        epochs, rest = divmod(step, self._steps_per_epoch)
        return epochs * self._images_per_epoch + min(rest * self._batch_size, self._images_per_epoch)
