"""Ranges of activations, against numpy on the activations themselves."""

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from dsimg.errors import ModelError
from dsimg_export import calibrate
from dsimg_export.calibrate import BINS, Histogram, extremes, histograms, mse_range, percentile_range
from dsimg_export.int8 import CONVOLUTIONAL_OPS, prepare
from tests.export.files import change, noise, write_network


@pytest.fixture
def prepared(tmp_path):
    path = tmp_path / "prepared.onnx"
    prepare(write_network(tmp_path / "fp32.onnx"), path)
    return path


def activations(path, images):
    """Return every tensor of the graph for some images, computed by onnx's reference implementation."""
    model = onnx.load(path)
    names = [name for node in model.graph.node for name in node.output]
    known = {value.name for value in model.graph.output}
    model.graph.output.extend(value for value in model.graph.value_info if value.name not in known)
    found = ReferenceEvaluator(model).run(names, {"images": images})
    return {"images": images, **dict(zip(names, found, strict=True))}


def as_histogram(values):
    low, high = float(values.min()), float(values.max())
    return Histogram(low, high, np.histogram(values, BINS, (low, high))[0])


def test_extremes_are_those_of_all_batches_and_of_the_operators_named(prepared):
    batches = [noise(3, seed=1), 4 * noise(2, seed=2), noise(1, seed=3)]
    found = extremes(prepared, iter(batches), ops=CONVOLUTIONAL_OPS)
    expected = activations(prepared, np.concatenate(batches))
    assert set(found) == {"images", "a", "b", "c", "d", "e", "f", "logits"}
    for name, (low, high) in found.items():
        assert (low, high) == pytest.approx((expected[name].min(), expected[name].max()), rel=1e-4, abs=1e-5)
    assert set(extremes(prepared, batches, ops=["Gemm"])) == {"f", "logits"}


def test_histograms_count_every_value_once(prepared):
    batches = [noise(3, seed=1), noise(2, seed=2)]
    ends = extremes(prepared, batches, ops=CONVOLUTIONAL_OPS)
    found = histograms(prepared, batches, ends)
    expected = activations(prepared, np.concatenate(batches))
    assert set(found) == set(ends)
    for name, histogram in found.items():
        values = expected[name]
        assert (histogram.lowest, histogram.highest) == ends[name]
        assert histogram.counts.sum() == values.size
        # Rounding may move a value to the next bin.
        assert np.abs(np.cumsum(histogram.counts) - np.cumsum(as_histogram(values).counts)).max() <= 3


def test_activations_of_one_image_at_a_time_are_in_memory(prepared, monkeypatch):
    sizes = []

    class Session:
        def run(self, names, feed):
            sizes.append(len(feed["images"]))
            return [np.zeros(1, np.float32) for _ in names]

    monkeypatch.setattr(calibrate, "open_session", lambda path, threads: Session())
    extremes(prepared, [noise(5), noise(2)], ops=CONVOLUTIONAL_OPS)
    histograms(prepared, [noise(3)], {"images": (0.0, 1.0), "a": (0.0, 1.0)})
    assert sizes == [1] * 10


def test_the_percentile_range_leaves_one_value_in_ten_thousand_out():
    values = np.random.default_rng(0).standard_normal(1_000_000)
    low, high = percentile_range(as_histogram(values))
    width = (values.max() - values.min()) / BINS
    assert low == pytest.approx(np.quantile(values, 0.00005), abs=2 * width)
    assert high == pytest.approx(np.quantile(values, 0.99995), abs=2 * width)
    positive = percentile_range(as_histogram(np.maximum(values, 0)))
    assert positive[0] == 0
    assert positive[1] == pytest.approx(high, abs=2 * width)


def squared_error(values, low, high):
    scale = (high - low) / 255
    zero = np.round(-low / scale)
    found = (np.clip(np.round(values / scale) + zero, 0, 255) - zero) * scale
    return np.square(found - values).mean()


@pytest.mark.parametrize("kind", ["normal", "rectified", "outlier"])
def test_the_mse_range_has_a_smaller_error_than_any_other_that_is_tried(kind):
    values = np.random.default_rng(0).standard_normal(20_000)
    if kind == "rectified":
        values = np.maximum(values, 0)
    if kind == "outlier":
        values[0] = 100.0
    found = mse_range(as_histogram(values))
    error = squared_error(values, *found)
    tried = [
        squared_error(values, low, high)
        for high in values.max() * np.linspace(0.1, 1, 19)
        for low in (np.unique(values.min() * np.linspace(0.1, 1, 19)) if values.min() < 0 else [0.0])
    ]
    assert error <= 1.02 * min(tried)
    assert error < squared_error(values, min(values.min(), 0), values.max())


def test_a_tensor_that_is_always_the_same_keeps_its_value():
    assert mse_range(Histogram(0.0, 0.0, np.full(BINS, 0))) == (0.0, 0.0)
    counts = np.bincount([0], minlength=BINS)
    low, high = percentile_range(Histogram(3.0, 3.0, counts))
    assert (low, high) == (3.0, 3.0)


def test_no_room_for_temporary_files_is_a_message(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(ModelError, match=r"cannot write a temporary file to calibrate with: .*missing.*set TMPDIR to"):
        extremes(prepared, [noise(1)], ops=CONVOLUTIONAL_OPS)


def test_values_that_are_not_finite_are_named(tmp_path):
    source, prepared = write_network(tmp_path / "fp32.onnx"), tmp_path / "prepared.onnx"
    change(source, {"conv2.bias": np.full(16, np.inf, np.float32)})
    prepare(source, prepared)
    with pytest.raises(ModelError, match=r"the values of 'c' in .*prepared\.onnx are not finite on a calibration"):
        extremes(prepared, [noise(1)], ops=CONVOLUTIONAL_OPS)
