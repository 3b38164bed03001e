import json
import math
import subprocess
import sys

import numpy as np
import pytest

from dsimg.metrics import (
    NO_CLASS,
    accuracy_text,
    best_classes,
    compared_text,
    evaluation_report,
    mcnemar,
    top_k,
    wilson_interval,
)


def test_wilson_interval_values():
    # 81 of 263: (0.2553, 0.3662), the worked example of Newcombe 1998, table I, method 3.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == (0.0, pytest.approx(0.1611, abs=5e-5))
    assert wilson_interval(20, 20) == (pytest.approx(0.8389, abs=5e-5), 1.0)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_wilson_interval_narrows_with_z():
    wide, narrow = wilson_interval(50, 100), wilson_interval(50, 100, z=1.0)
    assert wide[0] < narrow[0] < 0.5 < narrow[1] < wide[1]


def test_top_k_orders_and_breaks_ties_by_id():
    logits = np.array([[0.0, 3.0, 1.0, 2.0], [1.0, 5.0, 5.0, 1.0], [7.0, 7.0, 7.0, 7.0]], dtype=np.float32)
    assert top_k(logits, 3).tolist() == [[1, 3, 2], [1, 2, 0], [0, 1, 2]]


def test_top_k_of_few_classes_is_all_of_them():
    assert top_k(np.array([[1.0, 2.0]]), 5).tolist() == [[1, 0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_top_k_gives_no_class_to_a_row_that_is_not_finite(bad):
    logits = np.array([[1.0, bad, 0.0], [1.0, 2.0, 0.0]])
    assert top_k(logits, 2).tolist() == [[NO_CLASS, NO_CLASS], [1, 0]]


def test_report_of_six_classes():
    classes = ["a", "b", "c", "d", "e", "f"]
    labels = np.array([0, 0, 1, 2, 5])
    logits = np.array(
        [
            [9, 1, 2, 3, 4, 0],  # right
            [1, 9, 2, 3, 4, 5],  # label is sixth: not in the first five
            [9, 8, 2, 3, 4, 5],  # label is second
            [0, 0, np.nan, 0, 0, 0],  # no prediction
            [0, 1, 2, 3, 4, 9],  # right
        ],
        dtype=np.float32,
    )
    losses = np.array([0.5, 1.0, 1.5, np.nan, 3.0], dtype=np.float32)
    report = evaluation_report(labels=labels, top=top_k(logits, 5), losses=losses, classes=classes)

    assert report["images"] == 5
    assert report["correct"] == 2
    assert report["not_finite"] == 1
    assert report["top1"] == {"value": 0.4, "interval": list(wilson_interval(2, 5))}
    assert report["top5"] == {"value": 0.6, "interval": list(wilson_interval(3, 5))}
    assert report["loss"] == 1.5
    assert report["confusion"] == [[0, 0, 1], [0, 1, 1], [1, 0, 1], [2, -1, 1], [5, 5, 1]]
    assert report["per_class"][0] == {
        "class": "a",
        "images": 2,
        "correct": 1,
        "predicted": 2,
        "accuracy": 0.5,
        "precision": 0.5,
    }
    assert report["per_class"][2] == {
        "class": "c",
        "images": 1,
        "correct": 0,
        "predicted": 0,
        "accuracy": 0.0,
        "precision": None,
    }
    assert report["per_class"][3]["accuracy"] is None
    assert sum(row["images"] for row in report["per_class"]) == 5
    assert json.loads(json.dumps(report, allow_nan=False)) == report


@pytest.mark.parametrize("count", [2, 5])
def test_top5_is_none_where_every_class_is_among_the_first_five(count):
    logits = np.eye(count)
    report = evaluation_report(
        labels=np.arange(count),
        top=top_k(logits, 5),
        losses=np.ones(count),
        classes=[str(i) for i in range(count)],
    )
    assert report["top5"] is None
    assert report["top1"]["value"] == 1.0


def test_report_without_images():
    report = evaluation_report(
        labels=np.zeros(0, dtype=np.int64),
        top=np.zeros((0, 2), dtype=np.int64),
        losses=np.zeros(0),
        classes=["a", "b"],
    )
    assert report["top1"] == {"value": None, "interval": [0.0, 1.0]}
    assert report["loss"] is None
    assert report["confusion"] == []


def test_report_matches_a_count_by_hand_on_random_predictions():
    rng = np.random.default_rng(0)
    labels, logits = rng.integers(0, 7, 1003), rng.normal(size=(1003, 7))
    top = top_k(logits, 5)
    report = evaluation_report(labels=labels, top=top, losses=np.zeros(1003), classes=[f"class {i}" for i in range(7)])
    assert report["correct"] == sum(int(row.argmax()) == label for row, label in zip(logits, labels, strict=True))
    cells = {(label, predicted): count for label, predicted, count in report["confusion"]}
    for label in range(7):
        for predicted in range(7):
            expected = int(((labels == label) & (logits.argmax(1) == predicted)).sum())
            assert cells.get((label, predicted), 0) == expected
    assert sum(cells.values()) == 1003


def test_a_label_outside_the_classes_is_our_own_mistake():
    with pytest.raises(AssertionError, match="a label is not a class"):
        evaluation_report(labels=np.array([2]), top=np.array([[0, 1]]), losses=np.zeros(1), classes=["a", "b"])


def answers(both: int, gained: int, lost: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which of some images two classifiers get right."""
    ours = [True] * both + [True] * gained + [False] * lost + [False] * neither
    theirs = [True] * both + [False] * gained + [True] * lost + [False] * neither
    return np.array(ours, bool), np.array(theirs, bool)


def test_mcnemar_values():
    test = mcnemar(*answers(70, 10, 2, 18))
    half = 1.959964 * math.sqrt(12 - 8**2 / 100) / 100
    assert test == {
        "gained": 10,
        "lost": 2,
        "p_value": pytest.approx(2 * (1 + 12 + 66) / 2**12),
        "difference": 0.08,
        "interval": [pytest.approx(0.08 - half), pytest.approx(0.08 + half)],
    }
    swapped = mcnemar(*reversed(answers(70, 10, 2, 18)))
    assert (swapped["gained"], swapped["lost"], swapped["difference"]) == (2, 10, -0.08)
    assert swapped["p_value"] == test["p_value"]


@pytest.mark.parametrize("n", [1, 5, 600])
def test_mcnemar_of_an_even_split_is_sure_of_nothing(n):
    assert mcnemar(*answers(3, n, n, 4))["p_value"] == 1.0


def test_mcnemar_where_both_are_right_and_wrong_together():
    same = {"gained": 0, "lost": 0, "p_value": 1.0, "difference": 0.0}
    assert mcnemar(*answers(5, 0, 0, 5)) == {**same, "interval": [0.0, 0.0]}
    assert mcnemar(*answers(0, 0, 0, 0)) == {**same, "interval": [-1.0, 1.0]}


def test_mcnemar_of_many_images_neither_overflows_nor_loses_its_figures():
    # 2^3000 is beyond a float. By the normal approximation with continuity, z = 99 / sqrt(3000): p = 0.0707.
    assert mcnemar(*answers(0, 1550, 1450, 0))["p_value"] == pytest.approx(0.0707, abs=5e-4)
    assert 0 <= mcnemar(*answers(0, 5000, 1000, 0))["p_value"] < 1e-300


def test_shares_and_comparisons_in_words():
    share = {"value": 0.75, "interval": [0.5, 1.0]}
    assert accuracy_text(share) == "75.00%  (95 % interval 50.00% to 100.00%)"
    assert compared_text(mcnemar(*answers(70, 10, 2, 18))) == (
        "+8.00 points (+1.39 to +14.61): 10 images won, 2 lost; McNemar p = 0.039"
    )


def test_metrics_does_not_load_torch():
    code = "import sys, dsimg.metrics; assert not {'torch', 'torchvision'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_best_classes_have_the_softmax_s_probabilities() -> None:
    logits = np.array([[1.0, 3.0, 3.0, 2.0], [np.nan, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0]], np.float32)
    shares = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True)
    found, not_finite, third = best_classes(logits, 3)
    assert found is not None
    assert third is not None
    assert not_finite is None
    assert [k for k, _ in found] == [1, 2, 3]
    np.testing.assert_allclose([share for _, share in found], shares[0, [1, 2, 3]], rtol=1e-12)
    assert third[0] == (3, pytest.approx(shares[2, 3], rel=1e-12))
    assert best_classes(logits[:0], 3) == []


@pytest.mark.parametrize("classes", [1, 2, 9, 127, 1000])
def test_a_row_s_best_classes_do_not_depend_on_its_neighbours(classes: int) -> None:
    random = np.random.default_rng(0)
    logits = (random.standard_normal((33, classes)) * 10).astype(np.float32)
    logits[3, 0], logits[4, -1], logits[5] = np.nan, -np.inf, 1.0
    assert best_classes(logits, 5) == [best_classes(row[None], 5)[0] for row in logits]
