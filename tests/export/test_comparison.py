"""fp32 against int8, on answers made by hand."""

from pathlib import Path

import numpy as np
import pytest

from dsimg.evaluation import gather, measure
from dsimg.folder import Split
from dsimg_export.comparison import Comparison
from dsimg_export.kernels import Product
from dsimg_export.session import Latency

CLASSES = ("ant", "bee", "fly")
LABELS = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
FP32 = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2])  # 7 of 10 right
INT8 = np.array([0, 0, 1, 0, 1, 0, 0, 2, 2, 2])  # 6 of 10: two lost, one won, one wrong in another way
PRODUCTS = (Product("stem", "QLinearConv", 900), Product("gate", "FusedConv", 60), Product("head", "QGemm", 40))


def evaluated(answers):
    split = Split(Path("val"), tuple(f"{number}.png" for number in range(10)), LABELS)
    return gather([measure(np.eye(3)[answers], LABELS, np.arange(10))], {}, split=split, classes=CLASSES)


def took(milliseconds):
    return Latency(median=milliseconds / 500, p99=milliseconds / 250, cpu=milliseconds / 1000, repeats=20)


def compare(*, int8=INT8, fp32_ms=3.0, int8_ms=1.0, max_drop=0.2):
    return Comparison(
        fp32=evaluated(FP32),
        int8=evaluated(int8),
        latency={"fp32": took(fp32_ms), "int8": took(int8_ms)},
        seconds={
            "fp32": {"Conv": 0.002, "HardSigmoid": 0.0005},
            "int8": {
                "QLinearConv": 0.0012,
                "HardSigmoid": 0.0006,
                "QuantizeLinear": 0.0004,
                "Mul": 0.0003,
                "Add": 0.0001,
            },
        },
        products=PRODUCTS,
        classes=CLASSES,
        max_drop=max_drop,
    )


def test_flips_are_counted_by_class():
    found = {row.pop("class"): row for row in compare().flips()}
    assert found == {
        "ant": {"images": 4, "changed": 2, "won": 1, "lost": 1},
        "bee": {"images": 4, "changed": 2, "won": 0, "lost": 1},
        "fly": {"images": 2, "changed": 0, "won": 0, "lost": 0},
    }


def test_everything_that_was_measured_is_kept():
    found = compare().as_dict()
    assert (found["fp32"]["correct"], found["int8"]["correct"], found["fp32"]["images"]) == (7, 6, 10)
    assert found["drop"] == pytest.approx(0.1)
    assert (found["mcnemar"]["gained"], found["mcnemar"]["lost"]) == (1, 2)
    assert found["int8"]["latency_ms"] == pytest.approx({"p50": 2.0, "p99": 4.0, "cpu": 1.0, "repeats": 20})
    assert found["speedup"] == pytest.approx(3.0)
    assert found["int8_macs"] == pytest.approx(0.94)
    assert found["float_products"] == ["gate"]
    assert found["recommended"] == "int8"


def test_int8_that_is_slower_is_not_recommended_and_says_where_the_time_goes():
    precision, why = compare(int8_ms=3.0).recommended()
    assert precision == "fp32"
    assert why == (
        "int8 is 1.00x as fast as fp32 here: its convolutions and matrix products take 1.2 ms, not 2 ms, all else "
        "1.4 ms, not 0.5 ms (most of it HardSigmoid, QuantizeLinear, Mul)"
    )


def test_int8_that_loses_too_much_is_not_recommended_however_fast():
    assert compare(max_drop=0.05).recommended() == (
        "fp32",
        "int8 loses 10.00 points, more than --max_drop 0.05 allows",
    )
    assert compare(int8=FP32, max_drop=0.0).recommended() == (
        "int8",
        "it is 3.00x as fast as fp32 here and loses nothing",
    )


def test_the_result_is_told_in_words():
    rows = compare().rows()
    assert ("", "4 of 10 images have another Top-1") in rows
    assert ("latency int8", "p50 2 ms, p99 4 ms") in rows
    assert ("in int8", "94.0% of the multiply-accumulates; in float: gate") in rows
    assert dict(rows)["Top-1 int8"].startswith("60.00%  (95 % interval ")
