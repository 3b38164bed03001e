"""Which layers int8 hurts most, and how few of them must stay in float."""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Yields numbers of layers to measure, is sent the drop with each, and returns the number that was looked for.
Search = Generator[list[int], Sequence[float], int | None]


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the squared difference of two sets of logits (N, C), in terms of the expected ones' squares.

    What moves all logits of an image alike changes no answer and is left out. Infinite where logits are not finite.
    """
    one, other = (logits - logits.mean(axis=1, keepdims=True, dtype=np.float64) for logits in (found, expected))
    error = float(np.square(one - other).sum() / max(float(np.square(other).sum()), np.finfo(np.float64).tiny))
    return error if math.isfinite(error) else math.inf


def worst_first(layers: Sequence[str], error_of: Callable[[str], float]) -> list[tuple[str, float]]:
    """Return the layers with the error that each causes where it alone is in int8, the largest first."""
    errors = [(layer, error_of(layer)) for layer in layers]
    return sorted(errors, key=lambda item: -item[1])


def fewest(limit: int, *, max_drop: float, start: int = 0, at_once: int = 1) -> Search:
    """Search the least number of layers in float, above `start` and up to `limit`, with which the drop is at most
    `max_drop`; None where it is not found.

    1, 2, 4, ... more than `start` are tried until one is good, then numbers between, `at_once` in each round: about
    2 log2(limit) rounds of one. Exact where the drop falls with the number.
    """
    tries = [start + 2**power for power in range(max(limit - start, 0).bit_length()) if start + 2**power < limit]
    tries += [limit] * (limit > start)
    bad = start
    good: int | None = None
    while good is None or good - bad > 1:
        if good is None:
            asked, tries = tries[:at_once], tries[at_once:]
            if not asked:
                return None
        else:
            count = min(at_once, good - bad - 1)
            asked = [bad + (good - bad) * place // (count + 1) for place in range(1, count + 1)]
        drops = yield asked
        for number, drop in zip(asked, drops, strict=True):
            if drop <= max_drop:
                good = number
                break
            bad = number
    return good


def together(
    searches: Mapping[str, Search], drops_of: Callable[[Mapping[str, list[int]]], Mapping[str, Sequence[float]]]
) -> dict[str, int | None]:
    """Return what each of several searches finds; in every round the drops that all of them ask for are measured by one
    call, and given back under the same names."""
    found: dict[str, int | None] = {}
    answers: Mapping[str, Any] = dict.fromkeys(searches)  # None starts a generator
    while answers:
        asked: dict[str, list[int]] = {}
        for name, drops in answers.items():
            try:
                asked[name] = searches[name].send(drops)
            except StopIteration as end:
                found[name] = end.value
        answers = drops_of(asked) if asked else {}
    return found
