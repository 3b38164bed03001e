import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dsimg.errors import ModelError
from dsimg.preprocess import Preprocess
from dsimg_export.calibrate import extremes
from dsimg_export.int8 import (
    CONVOLUTIONAL_OPS,
    TRANSFORMER_OPS,
    check_is_fp32,
    default_ops,
    layers,
    prepare,
    quantize_static_int8,
    write_dynamic,
    write_static,
)
from dsimg_export.onnx_file import describe, take_pixels, to_half
from dsimg_export.session import Int8Share, int8_share, open_session, operators_run, precision_of
from tests.export.files import INPUT_SIZE, noise, weights_of, write_network


def logits(path, images):
    return open_session(path).run(["logits"], {"images": images})[0]


def test_int8_is_close_to_fp32_and_really_int8(tmp_path):
    source, target = write_network(tmp_path / "fp32.onnx", width=32), tmp_path / "int8.onnx"
    quantize_static_int8(source, target, images=[noise(16, seed=seed) for seed in range(2)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp32.onnx", "int8.onnx"]
    assert int8_share(operators_run(target)) == Int8Share(int8=3, total=3)
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
    assert int8_share(operators_run(target)) == Int8Share(int8=1, total=3)


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
    with pytest.raises(ModelError, match=r"fp32\.onnx is not a whole ONNX file .*Copy or export it again"):
        quantize_static_int8(source, target, images=[noise(2)])
    assert [path.name for path in tmp_path.iterdir()] == ["fp32.onnx"]


@pytest.fixture
def prepared(tmp_path):
    path = tmp_path / "prepared.onnx"
    prepare(write_network(tmp_path / "fp32.onnx"), path)
    return path


def write(prepared, target, **options):
    ranges = extremes(prepared, [noise(8)], ops=CONVOLUTIONAL_OPS)
    write_static(prepared, target, ranges, ops=CONVOLUTIONAL_OPS, **options)


def test_layers_named_stay_in_float_in_the_session(tmp_path, prepared):
    assert layers(prepared, CONVOLUTIONAL_OPS) == ("conv1", "conv2", "pool", "head")
    write(prepared, tmp_path / "int8.onnx", exclude=["conv2"])
    assert int8_share(operators_run(tmp_path / "int8.onnx")) == Int8Share(int8=2, total=3)
    write(prepared, tmp_path / "float.onnx", exclude=layers(prepared, CONVOLUTIONAL_OPS))
    images = noise(2, seed=3)
    np.testing.assert_allclose(
        logits(tmp_path / "float.onnx", images), logits(tmp_path / "fp32.onnx", images), rtol=1e-5
    )


def test_reduced_weights_keep_to_seven_bits(tmp_path, prepared):
    largest = {}
    for name, reduce_range in {"eight": False, "seven": True}.items():
        write(prepared, tmp_path / name, reduce_range=reduce_range)
        weights = [value for value in weights_of(tmp_path / name).values() if value.dtype == np.int8 and value.ndim > 1]
        assert len(weights) == 3
        largest[name] = max(np.abs(value.astype(int)).max() for value in weights)
    assert largest == {"eight": 127, "seven": 64}


def test_dynamic_int8_quantizes_matrix_products_and_no_convolutions(tmp_path, prepared):
    target = tmp_path / "int8.onnx"
    write_dynamic(prepared, target)
    assert int8_share(operators_run(target)) == Int8Share(int8=1, total=3)
    images = noise(4, seed=3)
    expected = logits(tmp_path / "fp32.onnx", images)
    assert 0 < np.abs(logits(target, images) - expected).max() < 0.05 * np.abs(expected).max()
    write_dynamic(prepared, target, exclude=["head"])
    np.testing.assert_allclose(logits(target, images), expected, rtol=1e-5)


def test_a_weight_whose_shape_the_file_notes_is_quantized_too(tmp_path):
    model = onnx.load(write_network(tmp_path / "fp32.onnx"))
    (head,) = (tensor for tensor in model.graph.initializer if tensor.name == "head.weight")
    noted = onnx.helper.make_tensor_value_info(head.name, head.data_type, list(head.dims))
    model.graph.value_info.append(noted)  # as torch's exporter does
    onnx.save(model, tmp_path / "noted.onnx")
    prepare(tmp_path / "noted.onnx", tmp_path / "prepared.onnx")
    write_dynamic(tmp_path / "prepared.onnx", tmp_path / "int8.onnx")
    images = noise(4, seed=3)
    expected = logits(tmp_path / "fp32.onnx", images)
    assert 0 < np.abs(logits(tmp_path / "int8.onnx", images) - expected).max() < 0.05 * np.abs(expected).max()


def test_a_network_that_takes_pixels_normalises_them_in_float(tmp_path):
    preprocess = Preprocess.from_dict(
        {
            "input_size": INPUT_SIZE,
            "mean": [0.5] * 3,
            "std": [0.25] * 3,
            "interpolation": "bilinear",
            "crop_pct": 1.0,
        }
    )
    model = onnx.load(write_network(tmp_path / "fp32.onnx"))
    take_pixels(model, preprocess)
    onnx.save(model, tmp_path / "pixels.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), np.uint8)
    target = tmp_path / "int8.onnx"
    quantize_static_int8(tmp_path / "pixels.onnx", target, images=[pixels])
    assert int8_share(operators_run(target)) == Int8Share(int8=3, total=3)
    expected = logits(tmp_path / "pixels.onnx", pixels)
    assert 0 < np.abs(logits(target, pixels) - expected).max() < 0.05 * np.abs(expected).max()
    steps = {node.op_type: node for node in onnx.load(target).graph.node}
    assert steps["Mul"].input[0] == "images_float"  # not a value that was rounded to 8 bits


def test_an_int8_file_says_of_itself_what_its_source_does(tmp_path):
    source = write_network(tmp_path / "fp32.onnx")
    model = onnx.load(source)
    describe(model, {"dsimg.classes": ["ant", "bee"]})
    onnx.save(model, source)
    quantize_static_int8(source, tmp_path / "int8.onnx", images=[noise(2)])
    found = onnx.load(tmp_path / "int8.onnx").metadata_props
    assert {entry.key: entry.value for entry in found} == {"dsimg.classes": '["ant", "bee"]'}


def test_what_is_not_fp32_is_refused(tmp_path):
    source, target = write_network(tmp_path / "fp32.onnx"), tmp_path / "int8.onnx"
    check_is_fp32(source)
    quantize_static_int8(source, target, images=[noise(2)])
    with pytest.raises(ModelError, match=r"int8\.onnx is in int8 already\. Give the fp32 run"):
        check_is_fp32(target)
    onnx.save(to_half(onnx.load(source)), tmp_path / "fp16.onnx")
    with pytest.raises(ModelError, match=r"fp16\.onnx is in half precision\. Export the run again with --dtype fp32"):
        check_is_fp32(tmp_path / "fp16.onnx")


def test_a_file_with_only_its_weights_in_int8_is_no_fp32(tmp_path):
    nodes = [
        helper.make_node("DequantizeLinear", ["weights", "scale"], ["w"]),
        helper.make_node("MatMul", ["images", "w"], ["logits"]),
    ]
    values = {"weights": np.ones((4, 3), np.int8), "scale": np.float32(0.1)}
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, tmp_path / "weights.onnx")
    assert precision_of(model) == "int8"
    with pytest.raises(ModelError, match=r"weights\.onnx is in int8 already"):
        check_is_fp32(tmp_path / "weights.onnx")
