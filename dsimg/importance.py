"""How much each channel of a unit matters: one score a channel, higher means keep.

Only parameters that are floating point count, not running statistics. Of each slice the parameter is first reduced
to one number a position along the slice's dimension, so that a unit's score is a sum of table look-ups.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dsimg.channels import Slice, Unit

IMPORTANCES = ("group_norm", "taylor", "bn_scale", "lamp", "random")

Scores = NDArray[np.float64]
Table = Callable[[Slice], Scores]

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def scores(
    model: nn.Module, units: Sequence[Unit], *, importance: str, seed: int, gradients: Mapping[str, Tensor] | None
) -> list[Scores]:
    """Return, of each unit, (channels,) scores; `importance` is one of IMPORTANCES.

    - group_norm: the squares of all weights that a channel occupies, of each slice as a multiple of that slice's mean
      over the unit's channels, averaged over the slices. So a slice counts as much with 9 elements a channel as with
      9,000, and units compare: each has mean 1 (DepGraph, arXiv 2301.12900, section 3.3). Biases, which begin at 0 and
      mean nothing by their size, are left out.
    - taylor: |sum of weight * gradient| over a channel, summed over the slices: what the loss would change by to first
      order (Molchanov et al., arXiv 1906.10771). `gradients` has one of each parameter, by name; only this
      importance reads it.
    - bn_scale: mean |scale| of the unit's normalisation layers (network slimming, arXiv 1708.06519). A unit without
      any is scored by group_norm; units of one kind have the same structure, so the two are not ranked together.
    - lamp: group_norm's score by the sum of all scores of the unit that are at least as large (arXiv 2010.07611,
      on channels instead of single weights).
    - random: uniform in [0, 1), from (seed, the unit's name): the same in any order of the units.
    """
    assert importance in IMPORTANCES, importance
    if importance == "random":
        return [_random(unit, seed=seed) for unit in units]
    parameters = {
        name: parameter.detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.is_floating_point()
    }
    if importance == "taylor":
        assert gradients is not None, "taylor needs gradients"
        changes = _table(lambda tensor: parameters[tensor].float() * gradients[tensor].to(parameters[tensor].device))
        return [_taylor(unit, changes, [s for s in unit.slices if s.tensor in parameters]) for unit in units]

    squares = _table(lambda tensor: parameters[tensor].float().square())
    magnitudes = _table(lambda tensor: parameters[tensor].float().abs())
    norms = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, _NORMS)}
    result = []
    for unit in units:
        scales = [s for s in unit.slices if s.tensor in norms & parameters.keys()]
        if importance == "bn_scale" and scales:
            result.append(np.stack([magnitudes(s).mean(axis=1) for s in scales]).mean(axis=0))
            continue
        norm = _group_norm(
            unit, squares, [s for s in unit.slices if s.tensor in parameters and not s.tensor.endswith("bias")]
        )
        result.append(_lamp(norm) if importance == "lamp" else norm)
    return result


def _table(value_of: Callable[[str], Tensor]) -> Table:
    """Return the look-up of a slice: (channels, k) sums of `value_of(its tensor)` over every other dimension.

    Many units share a tensor and dimension (dense concatenation): each is reduced once.
    """
    found: dict[tuple[str, int], Scores] = {}

    def look_up(part: Slice) -> Scores:
        key = part.tensor, part.dim
        if key not in found:
            values = value_of(part.tensor)
            others = [dim for dim in range(values.dim()) if dim != part.dim]
            # Of one dimension there is nothing to sum, and an empty list would mean all.
            sums = values.sum(dim=others, dtype=torch.float64) if others else values.double()
            found[key] = np.asarray(sums.cpu(), dtype=np.float64)
        return found[key][part.index]

    return look_up


def _group_norm(unit: Unit, squares: Table, weights: Sequence[Slice]) -> Scores:
    total: Scores = np.zeros(unit.channels)
    for part in weights:
        energy = squares(part).sum(axis=1)
        if energy.any():  # a scale that begins at zero says nothing yet
            total += energy / energy.mean()
    mean = float(total.mean())
    return total / mean if mean > 0 else total


def _lamp(norm: Scores) -> Scores:
    ascending = np.sort(norm)
    at_least = np.cumsum(ascending[::-1])[::-1]  # at_least[i]: the sum of ascending[i:]
    sums = at_least[np.searchsorted(ascending, norm, side="left")]
    return np.divide(norm, sums, out=np.zeros_like(norm), where=sums > 0)


def _taylor(unit: Unit, changes: Table, weights: Sequence[Slice]) -> Scores:
    total: Scores = np.zeros(unit.channels)
    for part in weights:
        total += np.abs(changes(part).sum(axis=1))
    return total


def _random(unit: Unit, *, seed: int) -> Scores:
    digest = hashlib.sha256(f"{seed}:{unit.name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big")).random(unit.channels)
