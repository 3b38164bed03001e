"""A checkpoint on disk: whole or absent, hashed, verified, rotated. safetensors and JSON; no pickle is read.

`checkpoints/step_00000012/` holds `shard_R.safetensors` of each rank that wrote it and `state.json`, which carries the
hash of every shard and of itself. A shard maps `kind:start:name` to a flat piece of a named tensor, so that any number
of ranks and any ZeRO stage can read it.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsimg.errors import RunError
from dsimg.run import Run, sha256, sync_file, sync_folder, write_atomically, write_json

WEIGHT, EMA, BUFFER = "weight", "ema", "buffer"
ADAPTERS = "dsimg_hints"  # what --loss hint adds to a student while it learns, and is left out of its weights
SCHEMA = 1


def is_adapter(name: str) -> bool:
    """Tell whether a tensor is an adapter's, which no network has once it has learned."""
    return name.startswith(f"{ADAPTERS}.")


def key_of(kind: str, start: int, name: str) -> str:
    """Return the name of a piece in a shard: what it is, where it starts in the flattened tensor, which tensor."""
    return f"{kind}:{start}:{name}"


# Writing


def write_shard(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Any]:
    """Write a shard, sync it, read it back and compare; return its name, size and hash for `state.json`.

    Raises OSError or SafetensorError where the disk refuses, or gives back something else.
    """
    save_file(dict(tensors), path)
    sync_file(path)
    if hasattr(os, "posix_fadvise"):  # so that what is read below comes from the disk, where that is possible
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with safe_open(path, "pt") as shard:
        for key, tensor in tensors.items():
            if not torch.equal(shard.get_tensor(key).view(torch.uint8), tensor.view(torch.uint8)):
                raise OSError(None, "the disk gave back other bytes than were written", str(path))
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}


def commit(temporary: Path, state: Mapping[str, Any], shards: Sequence[Mapping[str, Any]], *, keep: int) -> Path:
    """Make a folder of synced shards a checkpoint, in one rename, and return it.

    `state` has `step`. The newest `keep` stay. For rank 0 alone, when all shards are written and verified.
    """
    folder = temporary.parent
    final = folder / f"step_{state['step']:08d}"
    for entry in shards:
        size = (temporary / entry["file"]).stat().st_size
        if size != entry["bytes"]:
            raise OSError(None, f"{entry['file']} has {size:,} bytes instead of {entry['bytes']:,}")
    content = {"schema": SCHEMA, **state, "shards": list(shards)}
    write_json(temporary / "state.json", {"digest": _digest(content), **content})
    if final.exists():  # one that was found damaged, or else it would have been resumed from
        shutil.rmtree(final)
    temporary.rename(final)
    sync_folder(folder)
    write_atomically(folder / "latest", f"{final.name}\n".encode())
    for path in (*checkpoints(folder)[keep:], *folder.glob("damaged_*")):
        shutil.rmtree(path, ignore_errors=True)
    return final


def prepare_folder(folder: Path) -> str:
    """Make the folder of checkpoints, remove what saves that were cut short have left in it, and return a token that
    keeps the names of this start's temporary folders apart from those."""
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    for path in folder.glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return secrets.token_hex(4)


# Choosing


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, newest first. Whether they are whole, `read_state` and `check_shards` say.

    Only names that a save gives: a copy that someone has put beside them is neither resumed from nor removed.
    """
    found = (path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8,}", path.name) and path.is_dir())
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def latest_note(folder: Path) -> str | None:
    """Return what is wrong with `latest`, the name of the newest checkpoint, as one line; None where nothing is."""
    found = checkpoints(folder)
    if not found:
        return None
    try:
        name = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None if len(found) == 1 else f"{folder / 'latest'} is missing"  # a kill between rename and `latest`
    except OSError as error:
        return f"{folder / 'latest'} cannot be read ({error.strerror})"
    if not name:
        return f"{folder / 'latest'} is empty"
    return None if (folder / name) in found else f"{folder / 'latest'} names {name[:40]!r}, which is not there"


def read_state(path: Path) -> dict[str, Any]:
    """Return the state that a checkpoint was saved with. Raises RunError when it is missing or damaged."""
    try:
        content = json.loads((path / "state.json").read_bytes())
        digest = content.pop("digest")
        if digest != _digest(content):
            raise ValueError("its digest does not fit its content")
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']}, this dsimg reads {SCHEMA}")
        state: dict[str, Any] = content
    except OSError as error:
        raise RunError(f"{path / 'state.json'}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path / 'state.json'} is damaged: {error}.") from error
    return state


def check_shards(path: Path, state: Mapping[str, Any], *, part: int = 0, parts: int = 1) -> str | None:
    """Return what is wrong with the first bad shard of every `parts`-th, from `part` on; None when all are as saved."""
    for entry in state["shards"][part::parts]:
        shard = path / entry["file"]
        try:
            size = shard.stat().st_size
            if size != entry["bytes"]:
                return f"{shard} has {size:,} bytes instead of {entry['bytes']:,}"
            if sha256(shard) != entry["sha256"]:
                return f"{shard} is not the file that was saved: its hash differs"
        except OSError as error:
            return f"{shard}: {error.strerror}"
    return None


def set_aside(path: Path) -> None:
    """Rename a damaged checkpoint, so that it is neither chosen again nor counted; the next save removes it."""
    aside = path.with_name(path.name.replace("step_", "damaged_"))
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


# Reading


class Pieces:
    """The tensors of a checkpoint, read piece by piece: nothing is loaded before it is asked for."""

    def __init__(self, path: Path, state: Mapping[str, Any]) -> None:
        """Raises RunError where a shard cannot be opened."""
        self._path = path
        try:
            self._shards: list[Any] = [safe_open(path / entry["file"], "pt") for entry in state["shards"]]
        except (OSError, SafetensorError) as error:
            raise RunError(f"the checkpoint {path} is damaged: {error}.") from error
        self._found: dict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
        for index, shard in enumerate(self._shards):
            for key in shard.keys():  # noqa: SIM118 - it has no iterator
                kind, start, name = key.split(":", 2)
                self._found[kind, name].append((int(start), index, key))

    @property
    def kinds(self) -> set[str]:
        """What is stored: weight, buffer, ema, and the optimizer's own names for its states."""
        return {kind for kind, _ in self._found}

    def names(self, kind: str) -> list[str]:
        """Return the names of the tensors of a kind."""
        return [name for found, name in self._found if found == kind]

    def fill(self, target: Tensor, kind: str, name: str, *, start: int) -> None:
        """Copy elements `start` to `start + len(target)` of the flattened tensor into `target` (N,).

        Raises RunError when the checkpoint does not have them all.
        """
        filled = 0
        end = start + len(target)
        for begin, index, key in self._found[kind, name]:
            stored = self._shards[index].get_slice(key)
            (length,) = stored.get_shape()
            low, high = max(begin, start), min(begin + length, end)
            if low < high:
                target[low - start : high - start] = stored[low - begin : high - begin]
                filled += high - low
        if filled != len(target):
            raise RunError(
                f"the checkpoint {self._path} has {filled} of {len(target)} values of {kind} {name}: it was made by "
                "another model or optimizer. Start anew with --overwrite, or give the flags it was made with."
            )

    def whole(self, kind: str, name: str, *, numel: int) -> Tensor:
        """Return a whole tensor, flattened (numel,), in fp32."""
        target = torch.empty(numel)
        self.fill(target, kind, name, start=0)
        return target

    def buffers(self, rank: int | None = None) -> dict[str, Tensor]:
        """Return the buffers, flattened: those of the rank that wrote them or, for None, one set for all.

        BatchNorm's statistics differ between ranks within an epoch. One set has their mean, and their variance with
        the variance of the means added, as `Engine.pool_batchnorm` makes them at an epoch's end; other buffers are
        those of rank 0.
        """
        stored = [
            {
                key.split(":", 2)[2]: shard.get_tensor(key)
                for key in shard.keys()  # noqa: SIM118
                if key.startswith(f"{BUFFER}:")
            }
            for shard in (self._shards if rank is None else self._shards[rank : rank + 1])
        ]
        one = stored[0]
        if rank is not None:
            return one
        for name in one:
            if name.endswith("running_mean") and (variance := f"{name[:-4]}var") in one:
                means = torch.stack([part[name].double() for part in stored])
                variances = torch.stack([part[variance].double() for part in stored])
                mean = means.sum(0) / len(stored)
                one[name] = mean.to(one[name].dtype)
                pooled = (variances + (means - mean).square()).sum(0) / len(stored)
                one[variance] = pooled.to(one[variance].dtype)
        return one


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is a checkpoint."""
    return (path / "state.json").exists()


def saved_model(path: Path) -> dict[str, Any]:
    """Return the model block of a finished run or of a checkpoint: arch, classes, preprocess, pruning if it was cut.

    Raises RunError.
    """
    model: dict[str, Any]
    if is_checkpoint(path):
        model = read_state(path)["model"]
        return model
    run = Run.open(path)
    model = run.model
    if run.has("pruning"):
        model["pruning"] = json.loads(run.file("pruning").read_bytes())
    return model


def read_model(path: Path) -> dict[str, Tensor]:
    """Return a checkpoint's fp32 weights and its buffers as a state dict: the EMA's where there is one, no adapters.

    For plain PyTorch: `model.load_state_dict(read_model(path))`. Raises RunError when the checkpoint is damaged.
    """
    state = read_state(path)
    problem = check_shards(path, state)
    if problem is not None:
        raise RunError(f"the checkpoint {path} is damaged: {problem}. Give another one beside it.")
    pieces = Pieces(path, state)
    averaged = set(pieces.names(EMA))
    buffers = pieces.buffers()
    model: dict[str, Tensor] = {}
    for name, (shape, stored_as) in state["tensors"].items():
        if is_adapter(name):
            continue
        if stored_as in buffers:
            flat = buffers.get(f"ema:{stored_as}", buffers[stored_as])
        else:
            size = torch.Size(shape).numel()
            flat = pieces.whole(EMA if stored_as in averaged else WEIGHT, stored_as, numel=size)
        model[name] = flat.view(shape)
    return model


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
