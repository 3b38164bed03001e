"""Metrics of a classifier from predictions and labels. numpy only: training, evaluation and serving share it.

A row of logits that holds NaN or an infinity has no prediction: its class ids are `NO_CLASS`, it is never
right, and the report counts it under `not_finite`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NO_CLASS = -1
TOP = 5  # class ids that a report needs of each image, where there are so many

IntArray = npt.NDArray[np.integer[Any]]
FloatArray = npt.NDArray[np.floating[Any]]


def wilson_interval(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the Wilson score interval (lo, hi) of a share, 95 % at the default z; (0, 1) when n is 0.

    Wilson 1927, doi 10.2307/2276774. Unlike p +- z sqrt(p (1 - p) / n) it stays within [0, 1] and does not
    collapse to a point at 0 or n successes.
    """
    assert 0 <= successes <= n, (successes, n)
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    scale = 1 + z * z / n
    centre = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    # At 0 and n successes the bound is exactly 0 or 1; rounding would leave 1e-17.
    lo = 0.0 if successes == 0 else centre - half
    hi = 1.0 if successes == n else centre + half
    return lo, hi


def top_k(logits: FloatArray, k: int) -> npt.NDArray[np.int64]:
    """logits: (N, C) -> (N, min(k, C)) class ids, best first; of equal logits the lower id is first.

    Rows that are not finite are `NO_CLASS` throughout.
    """
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int64)
    ids[~np.isfinite(logits).all(axis=1)] = NO_CLASS
    return ids


def best_classes(logits: FloatArray, k: int) -> list[list[tuple[int, float]] | None]:
    """logits: (N, C) -> for each row the best k classes with their probabilities, best first; None where a logit is not
    finite."""
    finite = np.asarray(np.isfinite(logits).all(axis=1), np.bool_)
    exact = logits[finite].astype(np.float64)
    shares = np.exp(exact - exact.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    ids = top_k(exact, k)
    best = np.take_along_axis(shares, ids, axis=1)
    rows = (list(zip(*row, strict=True)) for row in zip(ids.tolist(), best.tolist(), strict=True))
    return [next(rows) if good else None for good in finite.tolist()]


def evaluation_report(*, labels: IntArray, top: IntArray, losses: FloatArray, classes: Sequence[str]) -> dict[str, Any]:
    """Return the evaluation as a dict that JSON can hold (no NaN).

    labels: (N,) in [0, C); top: (N, K) class ids from `top_k`, K = min(TOP, C); losses: (N,); classes: C names.

    - images, correct: counts. not_finite: images without a prediction.
    - top1, top5: {value, interval}, the interval being Wilson's at 95 %. top5 is None with five classes or
      fewer, where it says nothing. Values are None when there are no images.
    - loss: mean over the images whose loss is finite; None when there is none.
    - per_class: {class, images, correct, predicted, accuracy, precision}; accuracy is None for a class
      without images, precision for a class never predicted.
    - confusion: [label, predicted, count] for every pair that occurs, sorted; predicted is -1 where there was
      no prediction. The counts add up to images.
    """
    n, count = len(labels), len(classes)
    assert top.shape == (n, min(TOP, count)), (top.shape, n, count)
    assert losses.shape == (n,), (losses.shape, n)
    assert n == 0 or (labels.min() >= 0 and labels.max() < count), "a label is not a class"
    assert n == 0 or (top.min() >= NO_CLASS and top.max() < count), "a prediction is not a class"

    predicted = top[:, 0].astype(np.int64)
    labels = labels.astype(np.int64)
    # One integer a (label, prediction) pair; the extra column 0 is NO_CLASS.
    pairs, pair_counts = np.unique(labels * (count + 1) + predicted + 1, return_counts=True)
    confusion = [
        [int(pair) // (count + 1), int(pair) % (count + 1) - 1, int(times)]
        for pair, times in zip(pairs, pair_counts, strict=True)
    ]
    right = predicted == labels
    support = np.bincount(labels, minlength=count)
    hits = np.bincount(labels[right], minlength=count)
    chosen = np.bincount(predicted[predicted != NO_CLASS], minlength=count)
    assert int(support.sum()) == n
    assert sum(times for _, _, times in confusion) == n

    in_top5 = int((top == labels[:, None]).any(axis=1).sum())
    finite = losses[np.isfinite(losses)].astype(np.float64)
    return {
        "images": n,
        "correct": int(right.sum()),
        "not_finite": int((predicted == NO_CLASS).sum()),
        "top1": _share(int(right.sum()), n),
        "top5": _share(in_top5, n) if count > 5 else None,
        "loss": float(finite.mean()) if len(finite) else None,
        "per_class": [
            {
                "class": name,
                "images": int(support[i]),
                "correct": int(hits[i]),
                "predicted": int(chosen[i]),
                "accuracy": int(hits[i]) / int(support[i]) if support[i] else None,
                "precision": int(hits[i]) / int(chosen[i]) if chosen[i] else None,
            }
            for i, name in enumerate(classes)
        ],
        "confusion": confusion,
    }


def mcnemar(ours: npt.NDArray[np.bool_], theirs: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Return McNemar's exact test of two classifiers on the same images; ours, theirs: (N,) whether each was right.

    - gained, lost: images that only ours, only theirs got right. p_value: how likely so uneven a split is when both are
      equally good, two-sided, from the binomial distribution (McNemar 1947, doi 10.1007/BF02295996).
    - difference, interval: ours - theirs in accuracy, with Wald's interval at 95 % for paired shares.
    """
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    gained, lost, n = int((ours & ~theirs).sum()), int((theirs & ~ours).sum()), len(ours)
    both = gained + lost
    # In logarithms: 2^both is too large for a float from 1024 on.
    tail = [
        math.lgamma(both + 1) - math.lgamma(k + 1) - math.lgamma(both - k + 1) for k in range(min(gained, lost) + 1)
    ]
    p_value = min(1.0, 2 * sum(math.exp(one - both * math.log(2)) for one in tail))
    difference = (gained - lost) / n if n else 0.0
    half = 1.959964 * math.sqrt(max(both - (gained - lost) ** 2 / n, 0.0)) / n if n else 1.0
    return {
        "gained": gained,
        "lost": lost,
        "p_value": p_value,
        "difference": difference,
        "interval": [difference - half, difference + half],
    }


def accuracy_text(share: Mapping[str, Any]) -> str:
    """Return a report's share in words: '87.08%  (95 % interval 86.41% to 87.72%)'."""
    low, high = share["interval"]
    return f"{share['value']:.2%}  (95 % interval {low:.2%} to {high:.2%})"


def points_text(share: float) -> str:
    """Return a difference of accuracies in words: '1 point', '0.5 points'."""
    return f"{100 * share:g} point{'s' * (share != 0.01)}"


def compared_text(test: Mapping[str, Any] | None) -> str:
    """Return McNemar's test in words: the difference, its interval and how sure it is; None is no test."""
    if test is None:
        return "not compared: the readable validation images are others by now"
    low, high = test["interval"]
    return (
        f"{100 * test['difference']:+.2f} points ({100 * low:+.2f} to {100 * high:+.2f}): {test['gained']} images won, "
        f"{test['lost']} lost; McNemar p = {test['p_value']:.2g}"
    )


def _share(successes: int, n: int) -> dict[str, Any]:
    return {"value": successes / n if n else None, "interval": list(wilson_interval(successes, n))}
