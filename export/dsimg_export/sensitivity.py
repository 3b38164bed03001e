"""Which layers int8 hurts most, and how few of them must stay in float."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def relative_error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the squared difference of two sets of logits (N, C), in terms of the expected ones' squares.

    What moves all logits of an image alike changes no answer and is left out.
    """
    one, other = (logits - logits.mean(axis=1, keepdims=True, dtype=np.float64) for logits in (found, expected))
    return float(np.square(one - other).sum() / max(float(np.square(other).sum()), np.finfo(np.float64).tiny))


def worst_first(layers: Sequence[str], error_of: Callable[[str], float]) -> list[tuple[str, float]]:
    """Return the layers with the error that each causes where it alone is in int8, the largest first."""
    errors = [(layer, error_of(layer)) for layer in layers]
    return sorted(errors, key=lambda item: -item[1])


def fewest(limit: int, drop_at: Callable[[int], float], *, max_drop: float, start: int = 0) -> int | None:
    """Return the least number of layers in float, above `start` and up to `limit`, with which the drop is at most
    `max_drop`; None where it is not found.

    drop_at(k) measures the drop with k layers in float. k is doubled until one is good, then halved between: about
    2 log2(limit) measurements, exact where the drop falls with k.
    """
    bad, step = start, 1
    while bad < limit:
        good = min(start + step, limit)
        if drop_at(good) <= max_drop:
            break
        bad, step = good, 2 * step
    else:
        return None
    while good - bad > 1:
        middle = (good + bad) // 2
        if drop_at(middle) <= max_drop:
            good = middle
        else:
            bad = middle
    return good
