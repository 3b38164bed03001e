"""Cut channels out of a network, and rebuild the narrowed one from its architecture and a record in JSON, no pickle."""

import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dsimg.attention import attributes
from dsimg.channels import Indices, Unit
from dsimg.errors import ModelError, RunError
from dsimg.run import write_json

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """What was cut out of a network, said against its architecture's own width.

    `kept`: for each tensor of the state dict and each of its dimensions that was cut, the positions that stayed, in
    order. `modules`: for each module, the attributes that its narrower tensors ask for (out_channels, num_features …).
    """

    kept: Mapping[str, Mapping[int, Indices]]
    modules: Mapping[str, Mapping[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Return the record as `pruning.json` holds it: tensors that kept the same positions share one list."""
        lists: dict[tuple[int, ...], int] = {}
        tensors = {
            name: {str(dim): lists.setdefault(tuple(positions.tolist()), len(lists)) for dim, positions in dims.items()}
            for name, dims in self.kept.items()
        }
        return {
            "schema": SCHEMA,
            "modules": {name: dict(values) for name, values in self.modules.items()},
            "tensors": tensors,
            "kept": [list(positions) for positions in lists],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Record":
        """Return the record that `as_dict` made. Raises RunError for anything else."""
        try:
            if content["schema"] != SCHEMA:
                raise RunError(
                    f"the pruning record has schema {content['schema']}, this dsimg reads {SCHEMA}. Use the dsimg "
                    "version named in the run's run.json."
                )
            lists = [np.array([operator.index(position) for position in part], np.int64) for part in content["kept"]]
            kept = {
                name: {int(dim): lists[number] for dim, number in dims.items()}
                for name, dims in content["tensors"].items()
            }
            return cls(kept, {name: dict(values) for name, values in content["modules"].items()})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise RunError(
                f"the pruning record is not one that dsimg wrote ({type(error).__name__}: {error}). Restore it from "
                "where it was copied from, or prune anew."
            ) from error

    def save(self, path: Path) -> None:
        """Write `pruning.json`, atomically. Raises RunError."""
        write_json(path, self.as_dict())


def read_record(path: Path) -> Record:
    """Return the record in a `pruning.json`. Raises RunError when it is missing or not one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}. Restore it from where it was copied from.") from error
    return Record.from_dict(content if isinstance(content, dict) else {})


def cut(model: nn.Module, units: Sequence[Unit], kept: Sequence[Indices], *, before: Record | None = None) -> Record:
    """Narrow `model` in place to the channels that each unit keeps, and return the record of all that was ever cut.

    `kept[i]` holds the sorted channels of `units[i]`; `before` is the record of a network that had been cut already,
    so that what is returned refers to the architecture and not to what was left of it.
    """
    tensors = model.state_dict(keep_vars=True)
    gone: dict[tuple[str, int], list[Indices]] = {}
    for unit, channels in zip(units, kept, strict=True):
        lost = np.setdiff1d(np.arange(unit.channels), channels)
        if len(lost):
            for part in unit.slices:
                gone.setdefault((part.tensor, part.dim), []).append(part.index[lost].reshape(-1))
    stays: dict[str, dict[int, Indices]] = {}
    for (name, dim), lost_positions in gone.items():
        every = np.arange(tensors[name].shape[dim])
        stays.setdefault(name, {})[dim] = np.setdiff1d(every, np.concatenate(lost_positions)).astype(np.int64)
    _narrow(tensors, stays)
    changed: dict[str, dict[str, Any]] = {}
    for name, module in model.named_modules():
        for key, value in {**_attributes(module), **attributes(module)}.items():
            own = getattr(module, key)
            if (list(own) if isinstance(own, tuple) else own) != value:
                setattr(module, key, value)
                changed.setdefault(name, {})[key] = value
    if before is None:
        return Record(stays, changed)
    composed = {name: dict(dims) for name, dims in before.kept.items()}
    for name, dims in stays.items():
        for dim, positions in dims.items():
            earlier = composed.setdefault(name, {}).get(dim)
            composed[name][dim] = positions if earlier is None else earlier[positions]
    modules = {name: dict(values) for name, values in before.modules.items()}
    for name, values in changed.items():
        modules.setdefault(name, {}).update(values)
    return Record(composed, modules)


def rebuild(model: nn.Module, record: Record) -> None:
    """Narrow a fresh network of the architecture that `record` was made from, in place.

    What stays of its weights are the positions that were kept. Raises ModelError when it is another network.
    """
    tensors, modules = model.state_dict(keep_vars=True), dict(model.named_modules())
    unknown = [name for name in record.kept if name not in tensors] + [n for n in record.modules if n not in modules]
    short = [
        name
        for name, dims in record.kept.items()
        if name in tensors
        for dim, positions in dims.items()
        if not 0 <= dim < tensors[name].dim()
        or not all(0 <= position < tensors[name].shape[dim] for position in positions.tolist())
    ]
    if unknown or short:
        raise ModelError(
            f"the pruning record does not fit this network: it has no {(unknown + short)[0]} as wide as there. Build "
            "the architecture that the run names, with its classes."
        )
    _narrow(tensors, record.kept)
    for name, values in record.modules.items():
        for key, value in values.items():
            setattr(modules[name], key, value)


def _narrow(tensors: Mapping[str, Tensor], kept: Mapping[str, Mapping[int, Indices]]) -> None:
    for name, dims in kept.items():
        data = tensors[name].data
        for dim, positions in dims.items():
            data = data.index_select(dim, torch.from_numpy(positions).to(data.device))
        tensors[name].data = data.contiguous()
        tensors[name].grad = None


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return what a module's attributes have to be for the tensors that it has now; as JSON holds them."""
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        out, inner = module.weight.shape[:2]
        groups = 1 if module.groups == 1 else out // (module.out_channels // module.groups)
        return {"out_channels": out, "in_channels": inner * groups, "groups": groups}
    if isinstance(module, nn.Linear):
        return {"out_features": module.weight.shape[0], "in_features": module.weight.shape[1]}
    if isinstance(module, _BatchNorm):
        first = next((t for t in (weight, module.running_mean) if t is not None), None)
        return {} if first is None else {"num_features": first.shape[0]}
    if isinstance(module, nn.LayerNorm) and weight is not None:
        return {"normalized_shape": list(weight.shape)}
    if isinstance(module, nn.GroupNorm) and weight is not None:
        size = module.num_channels // module.num_groups
        return {"num_channels": weight.shape[0], "num_groups": weight.shape[0] // size}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": module.weight.shape[0]}
    return {}
