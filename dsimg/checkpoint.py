"""What a checkpoint holds of the engine, and saving it without holding up training.

Each rank copies what it owns and goes on; a thread writes, syncs, reads back and hashes the copy. When the threads of
all ranks are done, rank 0 makes the checkpoint visible in one rename.
"""

import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dsimg.console import Terminal, bytes_text
from dsimg.engine import Engine
from dsimg.errors import RunError
from dsimg.shards import (
    BUFFER,
    EMA,
    WEIGHT,
    Pieces,
    check_shards,
    checkpoints,
    commit,
    key_of,
    latest_note,
    prepare_folder,
    read_state,
    set_aside,
    write_shard,
)
from dsimg.world import World


class Saver:
    """Writes checkpoints beside the training. All ranks call `begin` and `finish` at the same steps."""

    def __init__(
        self,
        folder: Path,
        engine: Engine,
        *,
        keep: int,
        on_error: Literal["stop", "continue"],
        saved_step: int | None,
        terminal: Terminal,
    ) -> None:
        """`saved_step` is that of the checkpoint that training resumes from: the newest that is whole."""
        self._folder, self._engine, self._keep, self._on_error = folder, engine, keep, on_error
        self._terminal = terminal
        world = engine.world
        self._token: str = world.on_rank_zero(lambda: prepare_folder(folder))
        frozen = engine.frozen()
        self._frozen = frozen if world.rank == 0 else {}
        self._thread: threading.Thread | None = None
        self._result: dict[str, Any] | str = ""
        self._state: dict[str, Any] = {}
        self._temporary = folder
        self.saved_step = saved_step
        self.saves = 0
        self.paused = 0.0  # seconds that training stood still for all saves so far
        self.write_seconds = 0.0  # from the copy to the last byte on the disk, of the last save, the slowest rank
        self.shard_bytes = 0  # of the largest shard of the last save

    @property
    def busy(self) -> bool:
        """Whether a save has begun that is not finished."""
        return self._thread is not None

    @property
    def written(self) -> bool:
        """Whether this rank's part of the save lies on the disk, so that `finish` need not wait for it."""
        return self._thread is not None and not self._thread.is_alive()

    def begin(self, state: Mapping[str, Any]) -> None:
        """Copy what this rank owns and start writing it. `state` is JSON-able, the same on every rank, with `step`."""
        assert self._thread is None
        if state["step"] == self.saved_step:
            return
        begun = time.perf_counter()
        self._state = {
            **state,
            "scalars": _scalars(self._engine),
            "optimizer_counters": self._engine.optimizer_counters(),
            "tensors": self._engine.layout(),
        }
        self._temporary = self._folder / f".step_{state['step']:08d}.{self._token}.tmp"
        tensors = _owned_tensors(self._engine)
        tensors |= {key_of(WEIGHT, 0, name): value.reshape(-1) for name, value in self._frozen.items()}
        self._result = "its thread ended"
        self._thread = threading.Thread(target=self._write, args=(tensors, begun), name="dsimg-save", daemon=True)
        self._thread.start()
        self.paused += time.perf_counter() - begun

    def _write(self, tensors: dict[str, Tensor], begun: float) -> None:
        try:
            self._temporary.mkdir(exist_ok=True)
            record = write_shard(tensors, self._temporary / f"shard_{self._engine.world.rank}.safetensors")
            self._result = {**record, "seconds": time.perf_counter() - begun}
        except Exception as error:  # whatever it is, the thread must not end as if it had written
            self._result = _reason(error)

    def finish(self) -> None:
        """Wait until the save is written on all ranks and make it the newest checkpoint; without one, do nothing.

        Raises RunError on all ranks when it could not be written and `on_error` is "stop". The older ones stay.
        """
        if self._thread is None:
            return
        begun = time.perf_counter()
        self._thread.join()
        self._thread = None
        world, step = self._engine.world, self._state["step"]
        results = world.gather(self._result)
        failed = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str)]
        shards = [{key: result[key] for key in ("file", "bytes", "sha256")} for result in results if not failed]
        problem = world.on_rank_zero(lambda: failed[0] if failed else self._commit(shards))
        if problem is None:
            self.saved_step = step
            self.saves += 1
            self.write_seconds = max(result["seconds"] for result in results)
            self.shard_bytes = max(result["bytes"] for result in results)
        elif self._on_error == "stop":
            raise RunError(f"{self._failure(step, problem)} --on_save_error continue would train on.")
        else:
            self._terminal.warn(f"{self._failure(step, problem)} Training goes on.")
        self.paused += time.perf_counter() - begun

    def _commit(self, shards: list[dict[str, Any]]) -> str | None:
        try:
            commit(self._temporary, self._state, shards, keep=self._keep)
        except (OSError, RunError) as error:
            return _reason(error)
        return None

    def _failure(self, step: int, problem: str) -> str:
        if self._engine.world.rank == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)
        older = f"That of step {self.saved_step} stays" if self.saved_step is not None else "There is no older one"
        return f"cannot save the checkpoint of step {step}: {problem}. {older}; mend the disk (space, quota, rights)."

    def cost_text(self) -> str:
        """Return what the last save took, for people."""
        return f"{bytes_text(self.shard_bytes)} a rank, written in {self.write_seconds:.1f} s beside the training"


def choose_checkpoint(folder: Path, world: World, terminal: Terminal) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest checkpoint that verifies on all ranks, and its state; None when there is none.

    One line says what was wrong with each newer one, which is set aside. Raises RunError when none is whole.
    """
    found: list[Path] = world.on_rank_zero(lambda: checkpoints(folder))
    note: str | None = world.on_rank_zero(lambda: latest_note(folder))
    if note is not None:
        terminal.warn(f"{note}; taking the newest checkpoint that is whole")
    problems: list[str] = []
    for path in found:
        state: dict[str, Any] = {}
        problem: str | None = None
        try:
            state = read_state(path)
            problem = check_shards(path, state, part=world.rank, parts=world.size)
        except RunError as error:
            problem = str(error).rstrip(".")
        told = [said for said in world.gather(problem) if said is not None]
        if not told:
            return path, state
        problems.append(told[0])
        terminal.warn(f"{told[0]}; trying an older checkpoint")
    if found:
        raise RunError(
            f"no checkpoint in {folder} is whole: {problems[0]}. Copy one back from elsewhere, or start anew with "
            "--overwrite."
        )
    return None


def set_aside_newer(chosen: Path) -> None:
    """Put the damaged checkpoints that are newer than the chosen one out of the way of the next save. For rank 0."""
    for path in checkpoints(chosen.parent):
        if path == chosen:
            return
        set_aside(path)


def load_checkpoint(path: Path, state: Mapping[str, Any], engine: Engine) -> None:
    """Load weights, optimizer states, EMA and buffers into the engine, whatever ranks and stage they were saved with.

    Raises RunError when the checkpoint lacks something that this engine needs.
    """
    pieces = Pieces(path, state)
    optimizer_kinds = sorted(pieces.kinds - {WEIGHT, EMA, BUFFER})
    owners, averages = engine.owners(), engine.ema
    position = {id(owner): index for index, owner in enumerate(owners)}
    optimizer_state = engine.optimizer_state()
    engine.load_optimizer_counters(state["optimizer_counters"])
    with torch.no_grad():
        for owner in owners if optimizer_kinds else ():
            optimizer_state[owner] = {kind: torch.zeros_like(owner) for kind in optimizer_kinds}
            for name, value in state["scalars"].items():
                optimizer_state[owner][name] = torch.tensor(value, dtype=torch.float32)
        for fragment in engine.fragments():
            targets = {WEIGHT: fragment.owner}
            targets |= {kind: optimizer_state[fragment.owner][kind] for kind in optimizer_kinds}
            if averages:
                targets[EMA] = averages[position[id(fragment.owner)]]
            for kind, target in targets.items():
                pieces.fill(fragment.view(target), kind, fragment.name, start=fragment.start)
        engine.refresh()
        engine.load_frozen(lambda target, name: pieces.fill(target, WEIGHT, name, start=0))
        # Within an epoch BatchNorm's statistics are each rank's own.
        world = engine.world
        stored = pieces.buffers(world.rank if len(state["shards"]) == world.size else None)
        for name, buffer in engine.buffers().items():
            if name in stored:
                buffer.copy_(stored[name].view_as(buffer))


def _owned_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return a copy of what this rank writes: `kind:start:name` -> flat values on the CPU."""
    tensors: dict[str, Tensor] = {}
    position = {id(owner): index for index, owner in enumerate(engine.owners())}
    optimizer_state = engine.optimizer_state()
    for number, fragment in enumerate(engine.fragments()):
        if engine.zero_stage == 0 and number % engine.world.size != engine.world.rank:
            continue  # every rank has all of it: share the writing
        kinds = {WEIGHT: fragment.owner}
        for kind, value in optimizer_state.get(fragment.owner, {}).items():
            if isinstance(value, Tensor) and value.shape == fragment.owner.shape and value.dim() > 0:
                kinds[kind] = value
        if engine.ema:
            kinds[EMA] = engine.ema[position[id(fragment.owner)]]
        for kind, value in kinds.items():
            tensors[key_of(kind, fragment.start, fragment.name)] = fragment.view(value).to("cpu", copy=True)
    for name, buffer in engine.buffers().items():
        tensors[key_of(BUFFER, 0, name)] = buffer.detach().reshape(-1).to("cpu", copy=True)
    return tensors


def _scalars(engine: Engine) -> dict[str, float]:
    """Return the optimizer's scalar states (Adam's step), which are equal for all its parameters."""
    for owned in engine.optimizer_state().values():
        return {
            name: float(value) for name, value in owned.items() if not isinstance(value, Tensor) or value.dim() == 0
        }
    return {}


def _reason(error: Exception) -> str:
    """Return the operating system's words where there are some."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)
    return str(error).rstrip(".")
