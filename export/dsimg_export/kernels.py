"""What a session of ONNX Runtime computes: multiply-accumulates by type, and the time of each kind of operator."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from dsimg_export.session import FLOAT_OPS, INPUT, INT8_OPS, OUTPUT, noise_for, open_session

RUNS = 20  # of which each operator's median time is taken
CONVOLUTIONS = frozenset(("Conv", "FusedConv", "NhwcFusedConv", "QLinearConv", "ConvInteger"))
# Where the second factor stands among an operator's inputs, if not in place 1: after a scale and a zero point.
SECOND_FACTOR = {"QLinearConv": 3, "QLinearMatMul": 3, "QGemm": 3}
MARK = "_kernel_time"


@dataclass(frozen=True)
class Product:
    """A convolution or matrix product as a session runs it."""

    name: str
    op: str
    macs: int  # multiply-accumulates for one image

    @property
    def is_int8(self) -> bool:
        """Whether it multiplies 8-bit integers."""
        return self.op in INT8_OPS


def products(path: Path, input_size: tuple[int, int, int]) -> tuple[Product, ...]:
    """Return the convolutions and matrix products that a session of an ONNX file runs for one image.

    They are read from the session's own profile, not from the file: what is quantized there may run in float.
    Raises ModelError as `open_session`.
    """
    events = _profile(path, input_size, runs=1, shapes=True)
    return tuple(
        Product(event["name"].removesuffix(MARK), event["args"]["op_name"], _macs(event["args"]))
        for event in events
        if event["args"]["op_name"] in INT8_OPS | FLOAT_OPS
    )


def int8_macs(found: Sequence[Product]) -> float:
    """Return the share of the multiply-accumulates that are computed in int8, 0..1."""
    total = sum(product.macs for product in found)
    return sum(product.macs for product in found if product.is_int8) / total if total else 0.0


def seconds_by_operator(path: Path, input_size: tuple[int, int, int]) -> dict[str, float]:
    """Return how long a session with one thread spends in each kind of operator for one image, longest first.

    Raises ModelError as `open_session`.
    """
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in _profile(path, input_size, runs=RUNS):
        times[event["args"]["op_name"], event["name"]].append(event["dur"] / 1e6)
    total: dict[str, float] = defaultdict(float)
    for (op, _), values in times.items():
        total[op] += float(np.median(values))
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _profile(path: Path, input_size: tuple[int, int, int], *, runs: int, shapes: bool = False) -> list[dict[str, Any]]:
    """Return the events of ONNX Runtime's profile that are operators'. With `shapes` they tell those of weights too."""
    with tempfile.TemporaryDirectory(prefix="dsimg-") as folder:

        def adjust(options: onnxruntime.SessionOptions) -> None:
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(folder) / "profile")
            if shapes:
                options.add_session_config_entry("session.disable_prepacking", "1")  # it takes the shapes away

        # Its blocks of channels are filled up with zeros, which would be counted.
        session = open_session(path, adjust=adjust, without=("NchwcTransformer",) if shapes else ())
        images = noise_for(session, 1, input_size)
        for _ in range(runs):
            session.run([OUTPUT], {INPUT: images})
        events = json.loads(Path(session.end_profiling()).read_bytes())
    return [event for event in events if event.get("cat") == "Node" and event["name"].endswith(MARK)]


def _macs(event: Mapping[str, Any]) -> int:
    """Return the multiply-accumulates of one run of an operator, from the shapes in its profile."""
    op = event["op_name"]
    inputs = [next(iter(entry.values())) for entry in event["input_type_shape"]]
    output = next(iter(event["output_type_shape"][0].values()))
    first, second = inputs[0], inputs[SECOND_FACTOR.get(op, 1)]
    outputs = int(np.prod(output))
    if op in CONVOLUTIONS:
        return outputs * int(np.prod(second[1:]))  # weights are (out, in / groups, height, width)
    # Each output is a sum of K products; either factor may be transposed.
    if len(second) == 2:
        return outputs * int(np.prod(second)) // int(output[-1])
    return outputs * int(first[-1] if first[-2] == output[-2] else first[-2])
