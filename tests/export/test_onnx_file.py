import json

import numpy as np
import onnx
import pytest

from dsimg.errors import ModelError
from dsimg.preprocess import Preprocess, normalise
from dsimg_export.onnx_file import PIXEL_STEPS, describe, save_model, take_pixels, to_half
from dsimg_export.session import open_session, precision_of
from tests.export.files import noise, write_network

PREPROCESS = Preprocess(input_size=(3, 16, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))


@pytest.fixture
def model(tmp_path):
    return onnx.load(write_network(tmp_path / "network.onnx"))


def says(model, path, images):
    save_model(model, path)
    return open_session(path).run(["logits"], {"images": images})[0]


def test_pixels_are_normalised_in_the_graph_as_by_preprocess(model, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), dtype=np.uint8)
    expected = says(model, tmp_path / "float.onnx", normalise(pixels, PREPROCESS))
    take_pixels(model, PREPROCESS)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(says(model, tmp_path / "pixels.onnx", pixels), expected, rtol=1e-6, atol=1e-6)
    assert tuple(node.name for node in model.graph.node[:4]) == PIXEL_STEPS


def test_half_precision_has_half_weights_and_takes_and_gives_floats(model, tmp_path):
    images = noise(2)
    expected = says(model, tmp_path / "fp32.onnx", images)
    half = to_half(model)
    assert (precision_of(model), precision_of(half)) == ("fp32", "fp16")
    found = says(half, tmp_path / "fp16.onnx", images)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=0.01 * np.abs(expected).max())


def test_what_a_file_says_of_itself_is_replaced_by_key(model):
    describe(model, {"a": [1], "b": "x"})
    describe(model, {"a": {"c": None}})
    assert {entry.key: json.loads(entry.value) for entry in model.metadata_props} == {"a": {"c": None}, "b": "x"}


def test_a_disk_that_refuses_is_named(model, tmp_path):
    with pytest.raises(ModelError, match=r"cannot write .*gone/model\.onnx"):
        save_model(model, tmp_path / "gone" / "model.onnx")
