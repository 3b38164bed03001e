import json
import subprocess
import sys

import numpy as np
import pytest

from dsimg.metrics import NO_CLASS, evaluation_report, top_k, wilson_interval


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


def test_metrics_does_not_load_torch():
    code = "import sys, dsimg.metrics; assert not {'torch', 'torchvision'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
