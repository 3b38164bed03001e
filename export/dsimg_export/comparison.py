"""fp32 against int8: accuracy on the same images, latency in turn, what the session runs in int8, and what to serve."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsimg.console import ms_text
from dsimg.evaluation import Evaluation
from dsimg.metrics import accuracy_text, compared_text, mcnemar
from dsimg_export.kernels import Product, int8_macs
from dsimg_export.session import FLOAT_OPS, INT8_OPS, Latency

FASTER = 1.05  # below this, int8 is not worth another file and its drop
NAMED = 3  # operators and layers that are named in the terminal


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was measured of an fp32 file and of an int8 file of the same network, on one machine."""

    fp32: Evaluation
    int8: Evaluation
    latency: Mapping[str, Latency]  # "fp32", "int8": one image, one thread
    seconds: Mapping[str, Mapping[str, float]]  # "fp32", "int8": of each kind of operator
    products: Sequence[Product]  # of the int8 session
    classes: Sequence[str]
    max_drop: float

    @property
    def drop(self) -> float:
        """How much of the accuracy int8 loses, 0..1; negative where it wins."""
        return accuracy_drop(self.fp32, self.int8)

    @property
    def speedup(self) -> float:
        """How many times as fast int8 is: in processor time, which waiting for other work does not lengthen."""
        return self.latency["fp32"].cpu / self.latency["int8"].cpu

    def recommended(self) -> tuple[str, str]:
        """Return the precision to serve on this machine, and why."""
        if self.drop > self.max_drop:
            return "fp32", f"int8 loses {100 * self.drop:.2f} points, more than --max_drop {self.max_drop:g} allows"
        if self.speedup < FASTER:
            return "fp32", f"int8 is {self.speedup:.2f}x as fast as fp32 here: {self._where_time_goes()}"
        cost = f"loses {100 * self.drop:.2f} points" if self.drop > 0 else "loses nothing"
        return "int8", f"it is {self.speedup:.2f}x as fast as fp32 here and {cost}"

    def flips(self) -> list[dict[str, Any]]:
        """Return for each class its images, how many have another Top-1 in int8, and how many were won and lost."""
        labels = self.fp32.split.labels
        before, after = self.fp32.top[:, 0], self.int8.top[:, 0]
        rows = []
        for label, name in enumerate(self.classes):
            mine = labels == label
            rows.append(
                {
                    "class": name,
                    "images": int(mine.sum()),
                    "changed": int((mine & (before != after)).sum()),
                    "won": int((mine & (before != label) & (after == label)).sum()),
                    "lost": int((mine & (before == label) & (after != label)).sum()),
                }
            )
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return everything, as run.json keeps it."""
        precision, why = self.recommended()
        return {
            **{
                name: {
                    **{key: evaluation.report[key] for key in ("images", "correct", "top1", "top5", "loss")},
                    "latency_ms": latency_ms(self.latency[name]),
                    "ms_by_operator": {op: 1000 * value for op, value in self.seconds[name].items()},
                }
                for name, evaluation in (("fp32", self.fp32), ("int8", self.int8))
            },
            "drop": self.drop,
            "mcnemar": self._mcnemar(),
            "flips": self.flips(),
            "speedup": self.speedup,
            "int8_macs": int8_macs(self.products),
            "float_products": [product.name for product in self.products if not product.is_int8],
            "recommended": precision,
            "why": why,
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of the result table."""
        changed = sum(row["changed"] for row in self.flips())
        floats = [product.name for product in self.products if not product.is_int8]
        precision, why = self.recommended()
        return [
            ("Top-1 fp32", accuracy_text(self.fp32.report["top1"])),
            ("Top-1 int8", accuracy_text(self.int8.report["top1"])),
            ("difference", compared_text(self._mcnemar())),
            ("", f"{changed} of {self.fp32.report['images']} images have another Top-1"),
            *((f"latency {name}", latency_text(self.latency[name])) for name in ("fp32", "int8")),
            ("", f"one image, one thread: int8 is {self.speedup:.2f}x as fast, in processor time"),
            ("in int8", f"{int8_macs(self.products):.1%} of the multiply-accumulates{_named(floats)}"),
            ("serve", f"{precision}: {why}"),
        ]

    def _mcnemar(self) -> dict[str, Any]:
        labels = self.fp32.split.labels
        return mcnemar(self.int8.top[:, 0] == labels, self.fp32.top[:, 0] == labels)

    def _where_time_goes(self) -> str:
        """Say why int8 is not faster: the time of convolutions and products, and of all else, before and after."""
        parts = []
        for name in ("fp32", "int8"):
            arithmetic = sum(value for op, value in self.seconds[name].items() if op in FLOAT_OPS | INT8_OPS)
            rest = sum(self.seconds[name].values()) - arithmetic
            parts.append((ms_text(arithmetic), ms_text(rest)))
        (before, rest_before), (after, rest_after) = parts
        most = [op for op in self.seconds["int8"] if op not in FLOAT_OPS | INT8_OPS][:NAMED]
        return (
            f"its convolutions and matrix products take {after}, not {before}, all else {rest_after}, not "
            f"{rest_before} (most of it {', '.join(most) or 'nothing'})"
        )


def accuracy_drop(before: Evaluation, after: Evaluation) -> float:
    """Return how much of the accuracy is lost, 0..1, on the same images."""
    assert np.array_equal(before.split.labels, after.split.labels)
    lost: int = before.report["correct"] - after.report["correct"]
    return lost / int(before.report["images"])


def latency_ms(value: Latency) -> dict[str, float | int]:
    """Return a latency in milliseconds, as JSON keeps it."""
    return {"p50": 1000 * value.median, "p99": 1000 * value.p99, "cpu": 1000 * value.cpu, "repeats": value.repeats}


def latency_text(value: Latency) -> str:
    """Return a latency in words: 'p50 1.23 ms, p99 1.31 ms'."""
    return f"p50 {ms_text(value.median)}, p99 {ms_text(value.p99)}"


def _named(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"; in float: {', '.join(names[:NAMED])}{more}"
