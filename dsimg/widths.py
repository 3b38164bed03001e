"""Which channels go, in which order, and how many of them reach a target.

Channels go in blocks that keep every width a multiple of `round_to`, so that a runtime's vectorised kernels have no
remainder to deal with.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsimg.channels import Indices, Unit


@dataclass(frozen=True)
class Block:
    """Channels of one unit that go together."""

    unit: int  # its place in the list of units
    channels: Indices


def removal_order(
    units: Sequence[Unit],
    scores: Sequence[NDArray[np.float64]],
    *,
    round_to: int,
    max_ratio: float,
    whole: Sequence[float] | None = None,
) -> list[Block]:
    """Return every block that may be removed, in the order in which they go; any number of them leaves aligned widths.

    scores: of each unit (channels,), higher = keep. Within a unit the channels go in ascending score. After each of
    its blocks what is left, channels * width, is a multiple of `round_to`, at least `round_to` and at least
    1 - max_ratio (0 <= max_ratio <= 1) of the unit, or of `whole`, the channels that it had before earlier cuts; the
    first block is smaller where the unit is not aligned yet.

    Between units: the blocks of one kind are ranked by mean score, and all kinds lose the same share of their channels
    at the same time (isomorphic pruning, arXiv 2407.04616): scores of unlike layers do not compare, and one global
    ranking empties some layers. Ties go by the units' order, so the result is deterministic.
    """
    assert len(units) == len(scores), (len(units), len(scores))
    assert round_to >= 1, round_to
    assert 0 <= max_ratio <= 1, max_ratio
    ranked: dict[str, list[tuple[float, Block]]] = defaultdict(list)
    totals: dict[str, int] = defaultdict(int)
    for number, (unit, score) in enumerate(zip(units, scores, strict=True)):
        assert score.shape == (unit.channels,), (unit.name, score.shape)
        totals[unit.kind] += unit.channels
        assert np.isfinite(score).all(), unit.name
        mean = -math.inf
        least = (1 - max_ratio) * (unit.channels if whole is None else whole[number])
        for channels in _blocks(unit, score, round_to=round_to, least=least):
            # Means of ascending scores ascend but for their rounding, and a unit's own order has to hold.
            mean = max(mean, float(score[channels].mean()))
            ranked[unit.kind].append((mean, Block(number, channels)))

    merged = []
    for kind, blocks in ranked.items():
        blocks.sort(key=lambda pair: pair[0])
        gone = 0
        for _, block in blocks:
            gone += len(block.channels)
            merged.append((gone / totals[kind], block))
    merged.sort(key=lambda pair: pair[0])
    return [block for _, block in merged]


def kept_after(units: Sequence[Unit], blocks: Sequence[Block], count: int) -> list[Indices]:
    """Return, of each unit, the channels left in ascending order once the first `count` blocks are gone."""
    left = [np.ones(unit.channels, dtype=bool) for unit in units]
    for block in blocks[:count]:
        left[block.unit][block.channels] = False
    return [np.flatnonzero(mask) for mask in left]


def search(
    count: int,
    measure: Callable[[int], float],
    *,
    target: float,
    tolerance: float = 0.0,
    max_calls: int | None = None,
) -> tuple[int, float]:
    """Return (blocks, measured) nearest to `target` among what was measured, blocks in [0, count].

    Bisection on a `measure` that falls as blocks go. With no tolerance and no limit both neighbours of the target are
    measured, in about log2(count) + 2 calls; of two as near, fewer blocks win. A measure that takes seconds and is
    noisy, such as a latency, ends within `tolerance` (in the measure's unit) or after `max_calls`. A target out of
    reach takes two calls and gives the end that is nearest: compare what is returned.
    """
    assert max_calls is None or max_calls >= 1, max_calls
    found: dict[int, float] = {}

    def tried(blocks: int) -> float:
        found[blocks] = measure(blocks)
        return found[blocks]

    def nearest() -> int:
        return min(found, key=lambda blocks: (abs(found[blocks] - target), blocks))

    def enough() -> bool:
        return abs(found[nearest()] - target) <= tolerance or len(found) == max_calls

    # The most that can go first: it tells at once whether the target can be reached at all.
    least = tried(count)
    if count == 0 or enough():
        return nearest(), found[nearest()]
    if tried(0) > target > least:  # else one of the two ends is nearest, whatever a noisy measure says between
        low, high = 0, count
        while high - low > 1 and not enough():
            middle = (low + high) // 2
            low, high = (middle, high) if tried(middle) > target else (low, middle)
    return nearest(), found[nearest()]


def _blocks(unit: Unit, score: NDArray[np.float64], *, round_to: int, least: float) -> list[Indices]:
    """Return the unit's blocks, the least important first."""
    step = round_to // math.gcd(round_to, unit.width)  # channels whose width is the smallest multiple of round_to
    # 1e-9: 0.9 of 10 channels is 9, whatever binary fractions say. What is left is never nothing.
    removable = min(int(unit.channels - least + 1e-9), unit.channels - 1)
    ascending = np.argsort(score, kind="stable")
    ends = np.arange(unit.channels % step or step, removable + 1, step)
    starts = np.concatenate([[0], ends])
    return [ascending[start:end] for start, end in zip(starts, ends, strict=False)]
