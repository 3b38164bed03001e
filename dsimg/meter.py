"""What training shows and records: the live line, `metrics.jsonl` and DeepSpeed's monitors, fed from one place."""

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsimg.checkpoint import Saver
from dsimg.console import Terminal, count_text, duration_text
from dsimg.engine import Engine, StepInfo
from dsimg.errors import RunError
from dsimg.run import write_atomically


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, written by rank 0.

    Opened again after a stop, it is cut back to the step that training resumes from, so that no step stands twice.
    Where `keep_trying`, lines that a full disk refuses are kept and written with a later one.
    """

    def __init__(self, path: Path, *, step: int, rank: int, keep_trying: bool = False) -> None:
        self._path = path
        self._rank = rank
        self._keep_trying = keep_trying
        self._waiting: list[str] = []
        self._evaluated: set[int] = set()
        if rank == 0:
            try:
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
            except OSError as error:
                raise RunError(f"cannot read {path}: {error.strerror}. Put it right, or remove it.") from error
            kept = [line for line in lines if _step_of(line) <= step]
            records = [json.loads(line) for line in kept]
            self._evaluated = {record["step"] for record in records if record.get("kind") == "validation"}
            write_atomically(path, "".join(f"{line}\n" for line in kept).encode("utf-8"))

    def was_evaluated(self, step: int) -> bool:
        """Tell whether the file had an evaluation after this step when it was opened. On rank 0."""
        return step in self._evaluated

    def add(self, **values: Any) -> None:
        """Append one line. NaN and infinity, which JSON lacks, are written as text."""
        if self._rank == 0:
            plain = {
                key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in values.items()
            }
            self._waiting.append(json.dumps(plain) + "\n")
            try:
                self._write()
            except OSError as error:
                if not self._keep_trying:
                    raise RunError(
                        f"cannot write {self._path}: {error.strerror}. The same command goes on from the last "
                        "checkpoint."
                    ) from error

    def _write(self) -> None:
        """Append what waits, or nothing: half a line would hide the next one."""
        with self._path.open("ab", buffering=0) as stream:
            size, text = stream.tell(), "".join(self._waiting).encode()
            try:
                if stream.write(text) != len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                stream.truncate(size)
                raise
        self._waiting.clear()


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # a line that was being written when the process ended


class Meter:
    """Adds up what a logged step says, and shows and records it."""

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
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """`state` is what `state` returned when the run was saved."""
        self._engine = engine
        self._steps_per_epoch, self._images_per_epoch, self._batch_size = (
            steps_per_epoch,
            images_per_epoch,
            batch_size,
        )
        self._epochs, self._log_steps = epochs, log_steps
        self._file, self._terminal = file, terminal
        self._loss_sum: float = state["loss_sum"] if state else 0.0
        self._logged_step: int = state["logged_step"] if state else start_step
        self._waited = 0.0
        self._first_step = self._timed_step = start_step
        self._paused = 0.0
        self._begun = self._since = time.perf_counter()

    def state(self) -> dict[str, Any]:
        """Return what the line that is being added up holds so far, as JSON."""
        return {"loss_sum": self._loss_sum, "logged_step": self._logged_step}

    def waited(self, seconds: float) -> None:
        """Add time that was spent waiting for data."""
        self._waited += seconds

    def step(self, info: StepInfo, loss: float, *, epoch: int, step: int, ended: float, spike: float | None) -> None:
        """Count optimizer step `step`, the first being 1, with the mean loss over its samples; write and show a logged
        one. `ended` is when it did (time.perf_counter); `spike` the mean loss before it, where this is far above."""
        self._loss_sum += loss
        if spike is not None:
            self._file.add(kind="spike", step=step, epoch=epoch, loss=loss, mean_before=spike)
        last = step % self._steps_per_epoch == 0
        if not (last or step % self._log_steps == 0 or info.skipped):
            return
        engine = self._engine
        seconds = ended - self._since
        elapsed = ended - self._begun - self._paused
        values: dict[str, float] = {
            "loss": self._loss_sum / (step - self._logged_step),
            "lr": info.lr,
            "grad_norm": info.grad_norm,
            "images_per_second": (self._images(step) - self._images(self._timed_step)) / seconds,
            "data_wait": self._waited / seconds,
        }
        self._file.add(
            kind="train",
            step=step,
            epoch=epoch,
            **values,
            loss_scale=info.loss_scale,
            skipped_steps=info.skipped_steps,
            peak_memory_bytes=engine.peak_memory(),
            seconds=elapsed,
        )
        engine.write_monitor({f"Train/{name}": value for name, value in values.items()}, samples=self._images(step))
        remaining = (self._epochs * self._steps_per_epoch - step) * elapsed / (step - self._first_step)
        text = (
            f"epoch {(step - 1) // self._steps_per_epoch + 1}/{self._epochs}  step {step}  loss {values['loss']:.4f}  "
            f"lr {values['lr']:.3g}  |grad| {info.grad_norm:.3g}  {count_text(values['images_per_second'])} images/s  "
            f"data wait {values['data_wait']:.0%}  ETA {duration_text(remaining)}"
        )
        if info.skipped_steps:
            text += f"  skipped steps {info.skipped_steps}"
        self._terminal.progress(text, last=last)
        self._loss_sum, self._waited = 0.0, 0.0
        self._logged_step = self._timed_step = step
        self._since = ended

    def saved(self, saver: Saver, *, epoch: int, step: int) -> None:
        """Record a checkpoint that is on the disk: what it took, and how long all so far have held training up."""
        self._file.add(
            kind="checkpoint",
            step=step,
            epoch=epoch,
            saved_step=saver.saved_step,
            write_seconds=saver.write_seconds,
            paused_seconds=saver.paused,
            shard_bytes=saver.shard_bytes,
        )

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
