import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from dsimg.errors import ModelError
from dsimg_export.int8 import CONVOLUTIONAL_OPS, TRANSFORMER_OPS, default_ops, quantize_static_int8
from dsimg_export.session import Int8Share, int8_share, open_session
from tests.export.files import noise, write_network


def logits(path, images):
    return open_session(path).run(["logits"], {"images": images})[0]


def test_int8_is_close_to_fp32_and_really_int8(tmp_path):
    source, target = write_network(tmp_path / "fp32.onnx", width=32), tmp_path / "int8.onnx"
    quantize_static_int8(source, target, images=[noise(16, seed=seed) for seed in range(2)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp32.onnx", "int8.onnx"]
    assert int8_share(target) == Int8Share(int8=3, total=3)
    assert target.stat().st_size < 0.5 * source.stat().st_size
    for count in (1, 3):
        images = noise(count, seed=9)
        expected, found = logits(source, images), logits(target, images)
        assert 0 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_ranges_are_those_of_all_batches_and_activations_are_folded(tmp_path):
    source, target = write_network(tmp_path / "fp32.onnx"), tmp_path / "int8.onnx"
    images = noise(2)
    low, high = images.clip(-1, 1), images.clip(-2, 2)
    high.flat[0], high.flat[1] = -3.0, 2.0
    quantize_static_int8(source, target, images=iter([low, high, low]))
    graph = onnx.load(target).graph
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    first = next(node for node in graph.node if node.op_type == "QuantizeLinear" and node.input[0] == "images")
    assert tensors[first.input[1]] == pytest.approx(5 / 255, rel=1e-6)
    assert tensors[first.input[2]].dtype == np.uint8
    # A ReLU left between two conversions makes int8 slower than fp32.
    assert "Relu" not in {node.op_type for node in graph.node}
    scales = [tensors[node.input[1]] for node in graph.node if node.op_type == "DequantizeLinear"]
    assert {8, 16, 5} <= {scale.size for scale in scales}  # a scale for each output channel


def test_only_the_operators_named_are_quantized(tmp_path):
    source, target = write_network(tmp_path / "fp32.onnx"), tmp_path / "int8.onnx"
    quantize_static_int8(source, target, images=[noise(2)], ops=["Gemm"])
    assert int8_share(target) == Int8Share(int8=1, total=3)


def test_a_network_with_softmax_is_quantized_like_a_transformer(tmp_path):
    assert default_ops(write_network(tmp_path / "convolutional.onnx")) == CONVOLUTIONAL_OPS
    assert default_ops(write_network(tmp_path / "softmax.onnx", softmax=True)) == TRANSFORMER_OPS


def test_what_cannot_be_quantized_is_named_and_leaves_nothing(tmp_path):
    source, target = write_network(tmp_path / "fp32.onnx"), tmp_path / "int8.onnx"
    with pytest.raises(ModelError, match=r"there are no images to calibrate .*fp32\.onnx on"):
        quantize_static_int8(source, target, images=[])
    with pytest.raises(ModelError, match=r"cannot write .*missing/int8\.onnx"):
        quantize_static_int8(source, tmp_path / "missing" / "int8.onnx", images=[noise(2)])
    source.write_bytes(b"no network")
    with pytest.raises(ModelError, match=r"fp32\.onnx cannot be run by ONNX Runtime"):
        quantize_static_int8(source, target, images=[noise(2)])
    assert [path.name for path in tmp_path.iterdir()] == ["fp32.onnx"]
