"""Ranges of a network's activations from calibration images, in memory that does not grow with their number.

A first pass keeps the least and the greatest value of each tensor, a second one its histogram between them, both one
image at a time; ONNX Runtime's calibrators keep every activation of every image instead (onnxruntime #10503).
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from dsimg.errors import ModelError
from dsimg_export.session import INPUT, open_session

Range = tuple[float, float]

BINS = 4096  # sixteen a step of 8 bits: what is lost within a bin does not matter
PERCENTILE = 0.9999  # the share of values that the percentile range holds
LEVELS = 255  # steps of 8 bits
SHRINKS = np.linspace(1.0, 0.2, 81)  # of a range's end, tried by the search for the least squared error
ROUNDS = 2  # of that search, which moves one end and then the other


@dataclass(frozen=True)
class Histogram:
    """How often each value of a tensor occurred."""

    lowest: float
    highest: float
    counts: NDArray[np.int64]  # (BINS,) between lowest and highest


def tensors_of(model: onnx.ModelProto, ops: Sequence[str]) -> list[str]:
    """Return the float tensors that operators of these types read and write, weights apart, in the graph's order."""
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    floats = {
        value.name
        for value in (*graph.input, *graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    names = [name for node in graph.node if node.op_type in ops for name in (*node.input, *node.output)]
    return [name for name in dict.fromkeys(names) if name in floats and name not in weights]


def extremes(path: Path, batches: Iterable[NDArray[Any]], *, ops: Sequence[str], threads: int = 1) -> dict[str, Range]:
    """Return the least and the greatest value of each tensor (see `tensors_of`) of an ONNX file.

    batches: what the file takes, (N, ...); each is read once. They are reduced in the graph, so that two numbers a
    tensor leave the session. Raises ModelError: a value that is not finite, no batches.
    """
    model = onnx.load(path)
    names = tensors_of(model, ops)
    outputs = [f"dsimg_{op}_{index}" for index in range(len(names)) for op in ("Min", "Max")]
    for place, output in enumerate(outputs):
        reduction = "ReduceMin" if place % 2 == 0 else "ReduceMax"
        model.graph.node.append(helper.make_node(reduction, [names[place // 2]], [output], name=output, keepdims=0))
        model.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, []))
    found: NDArray[np.float32] | None = None
    for _, values in _outputs(model, batches, outputs, threads):
        pairs = np.array(values, np.float32).reshape(-1, 2)
        if not np.isfinite(pairs).all():
            name = names[int(np.flatnonzero(~np.isfinite(pairs).all(axis=1))[0])]
            raise ModelError(
                f"the values of '{name}' in {path} are not finite on a calibration image. Serve it in fp32."
            )
        if found is None:
            found = pairs
        else:
            found = np.stack([np.minimum(found[:, 0], pairs[:, 0]), np.maximum(found[:, 1], pairs[:, 1])], axis=1)
    if found is None:
        raise ModelError(f"there are no images to calibrate {path} on. Give at least one batch of training images.")
    return {name: (float(low), float(high)) for name, (low, high) in zip(names, found, strict=True)}


def histograms(
    path: Path, batches: Iterable[NDArray[Any]], ranges: Mapping[str, Range], *, threads: int = 1
) -> dict[str, Histogram]:
    """Return the histograms of the tensors in `ranges`, which `extremes` found on the same images."""
    model = onnx.load(path)
    given = {value.name for value in model.graph.output}
    known = {value.name: value for value in model.graph.value_info}
    inner = [name for name in ranges if name != INPUT]
    model.graph.output.extend(known[name] for name in inner if name not in given)
    counts = {name: np.zeros(BINS, np.int64) for name in ranges}
    for image, values in _outputs(model, batches, inner, threads):
        if INPUT in counts:
            counts[INPUT] += _counts(image, ranges[INPUT])
        for name, value in zip(inner, values, strict=True):
            counts[name] += _counts(value, ranges[name])
    return {name: Histogram(low, high, counts[name]) for name, (low, high) in ranges.items()}


def percentile_range(histogram: Histogram) -> Range:
    """Return the range that holds PERCENTILE of the values, as much of the rest below it as above."""
    edges = np.linspace(histogram.lowest, histogram.highest, BINS + 1)
    share = np.cumsum(histogram.counts) / max(int(histogram.counts.sum()), 1)
    tail = (1 - PERCENTILE) / 2
    low = int(np.searchsorted(share, tail, side="right"))
    high = int(np.searchsorted(share, 1 - tail, side="left"))
    return float(edges[min(low, BINS - 1)]), float(edges[min(high, BINS - 1) + 1])


def mse_range(histogram: Histogram) -> Range:
    """Return the range whose 256 levels leave the least squared error: what is cut off against what is rounded.

    Each end is moved towards zero in turn, the other held; the same search as in TensorRT-like calibrators, but over
    the error itself (Nagel et al. 2021, arXiv 2106.08295, eq. 26).
    """
    edges = np.linspace(histogram.lowest, histogram.highest, BINS + 1)
    used = np.flatnonzero(histogram.counts)
    values, counts = (edges[:-1] + edges[1:])[used] / 2, histogram.counts[used].astype(np.float64)
    low, high = np.float64(min(histogram.lowest, 0.0)), np.float64(max(histogram.highest, 0.0))
    if low == high:
        return histogram.lowest, histogram.highest
    for _ in range(ROUNDS if low < 0 < high else 1):
        if high > 0:
            ends = max(histogram.highest, 0.0) * SHRINKS
            high = ends[np.argmin([_squared_error(values, counts, low, end) for end in ends])]
        if low < 0:
            ends = min(histogram.lowest, 0.0) * SHRINKS
            low = ends[np.argmin([_squared_error(values, counts, end, high) for end in ends])]
    return float(low), float(high)


SEARCHES: dict[str, Callable[[Histogram], Range]] = {"percentile": percentile_range, "mse": mse_range}


def _squared_error(
    values: NDArray[np.float64], counts: NDArray[np.float64], low: np.float64, high: np.float64
) -> float:
    scale = (high - low) / LEVELS
    zero = np.round(-low / scale)
    levels = np.clip(np.round(values / scale) + zero, 0, LEVELS)
    return float(counts @ np.square((levels - zero) * scale - values))


def _counts(values: NDArray[np.float32], ends: Range) -> NDArray[np.int64]:
    low, high = ends
    flat = values.reshape(-1)
    if high <= low:
        return np.bincount([0], weights=[flat.size], minlength=BINS).astype(np.int64)
    places = ((flat - np.float32(low)) * np.float32(BINS / (high - low))).astype(np.int64)
    return np.bincount(np.clip(places, 0, BINS - 1, out=places), minlength=BINS)


def _outputs(
    model: onnx.ModelProto, batches: Iterable[NDArray[Any]], names: list[str], threads: int
) -> Iterator[tuple[NDArray[Any], list[NDArray[Any]]]]:
    """Yield each image as (1, ...) with the outputs `names` of a model for it: several at once would hold the
    activations of all of them. Raises ModelError, also where there is no room for a temporary file."""
    try:
        with tempfile.TemporaryDirectory(prefix="dsimg-") as folder:
            path = Path(folder) / "observed.onnx"
            onnx.save(model, path)
            session = open_session(path, threads=threads)
    except OSError as error:
        raise ModelError(
            f"cannot write a temporary file to calibrate with: {error}. Free some space there, or set TMPDIR to a "
            "folder with some."
        ) from error
    for batch in batches:
        for place in range(len(batch)):
            image = batch[place : place + 1]
            yield image, session.run(names, {INPUT: image})
