"""Checkpoints for resuming: what each rank owns, by parameter name, in safetensors and JSON.

A checkpoint is a folder `checkpoints/step_N/` with one `shard_R.safetensors` a rank and `state.json`, which rank 0
writes last, before the folder gets its name. Shards hold pieces of named parameters, so that any number of ranks
and any ZeRO stage can read them.
"""

import json
import os
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsimg.engine import Engine, Fragment
from dsimg.errors import RunError
from dsimg.run import write_json

WEIGHT, EMA, BUFFER = "weight", "ema", "buffer"


def save_checkpoint(folder: Path, engine: Engine, state: dict[str, Any]) -> Path:
    """Write a checkpoint at `state["step"]` and drop the older ones. All ranks take part.

    `state` is JSON-able and the same on every rank. The folder appears whole or not at all.
    """
    world = engine.world
    final = folder / f"step_{state['step']:08d}"
    temporary = folder / f".{final.name}.tmp"
    if world.rank == 0:
        for left_over in folder.glob(".step_*.tmp"):
            shutil.rmtree(left_over)
        temporary.mkdir(parents=True)
    world.barrier()
    shard = temporary / f"shard_{world.rank}.safetensors"
    try:
        save_file(_owned_tensors(engine), shard)
        with shard.open("rb") as stream:
            os.fsync(stream.fileno())
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"cannot save {shard}: {error}. The checkpoint before it is untouched; free some space."
        ) from error
    world.barrier()
    if world.rank == 0:
        write_json(temporary / "state.json", {**state, "shards": world.size, "scalars": _scalars(engine)})
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        for older in checkpoints(folder):
            if older != final:
                shutil.rmtree(older)
    world.barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step_*") if (path / "state.json").exists())


def read_state(path: Path) -> dict[str, Any]:
    """Return the state that a checkpoint was saved with. Raises RunError when it cannot be read."""
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"the checkpoint {path} is damaged: {error}. Start anew with --overwrite.") from error
    return state


def load_checkpoint(path: Path, engine: Engine) -> None:
    """Load weights, optimizer states, EMA and buffers into the engine.

    Raises RunError when the checkpoint is damaged or lacks something that this engine needs.
    """
    state = read_state(path)
    try:
        shards: list[Any] = [safe_open(path / f"shard_{rank}.safetensors", "pt") for rank in range(state["shards"])]
    except (OSError, SafetensorError) as error:
        raise RunError(f"the checkpoint {path} is damaged: {error}. Start anew with --overwrite.") from error
    pieces: dict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
    for index, shard in enumerate(shards):
        for key in shard.keys():  # noqa: SIM118 - it has no iterator
            kind, start, name = key.split(":", 2)
            pieces[kind, name].append((int(start), index, key))

    def fill(fragment: Fragment, kind: str, target: Tensor) -> None:
        """Copy what the shards hold of a fragment into `target`, this fragment's view of an owner-shaped tensor."""
        filled = 0
        for start, index, key in pieces[kind, fragment.name]:
            stored = shards[index].get_slice(key)
            (length,) = stored.get_shape()
            low, high = max(start, fragment.start), min(start + length, fragment.start + fragment.numel)
            if low < high:
                target[low - fragment.start : high - fragment.start] = stored[low - start : high - start]
                filled += high - low
        if filled != fragment.numel:
            raise RunError(
                f"the checkpoint {path} has {filled} of {fragment.numel} values of {kind} {fragment.name}: it was made "
                "by another model or optimizer. Start anew with --overwrite, or give the flags it was made with."
            )

    optimizer_kinds = sorted({kind for kind, _ in pieces} - {WEIGHT, EMA, BUFFER})
    owners, averages = engine.owners(), engine.ema
    position = {id(owner): index for index, owner in enumerate(owners)}
    optimizer_state = engine.optimizer_state()
    with torch.no_grad():
        for owner in owners if optimizer_kinds else ():
            optimizer_state[owner] = {kind: torch.zeros_like(owner) for kind in optimizer_kinds}
            for name, value in state["scalars"].items():
                optimizer_state[owner][name] = torch.tensor(value, dtype=torch.float32)
        for fragment in engine.fragments():
            fill(fragment, WEIGHT, fragment.view(fragment.owner))
            for kind in optimizer_kinds:
                fill(fragment, kind, fragment.view(optimizer_state[fragment.owner][kind]))
            if averages:
                fill(fragment, EMA, fragment.view(averages[position[id(fragment.owner)]]))
        engine.refresh()
        buffers = engine.buffers()
        for (kind, name), found in pieces.items():
            if kind == BUFFER:
                ((_, index, key),) = found
                buffers[name].copy_(shards[index].get_tensor(key).view_as(buffers[name]))


def _owned_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return what this rank writes: `kind:start:parameter name` -> values, flattened."""
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
            tensors[f"{kind}:{fragment.start}:{fragment.name}"] = fragment.view(value).cpu().clone()
    if engine.world.rank == 0:
        for name, buffer in engine.buffers().items():
            tensors[f"{BUFFER}:0:{name}"] = buffer.detach().cpu().reshape(-1).clone()
    return tensors


def _scalars(engine: Engine) -> dict[str, float]:
    """Return the optimizer's scalar states (Adam's step), which are equal for all its parameters."""
    for owned in engine.optimizer_state().values():
        return {
            name: float(value) for name, value in owned.items() if not isinstance(value, Tensor) or value.dim() == 0
        }
    return {}
