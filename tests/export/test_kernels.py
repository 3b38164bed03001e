"""What sessions compute, counted by hand."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dsimg_export.int8 import quantize_static_int8
from dsimg_export.kernels import int8_macs, products, seconds_by_operator
from tests.export.files import INPUT_SIZE, noise, write_network

# Two 3 x 3 convolutions of 16 x 16 pixels, 3 -> 8 -> 16 channels, and a linear layer 16 -> 5.
CONV1, CONV2, HEAD = 16 * 16 * 8 * 3 * 9, 16 * 16 * 16 * 8 * 9, 16 * 5


def test_multiply_accumulates_are_those_of_the_network(tmp_path):
    found = products(write_network(tmp_path / "fp32.onnx"), INPUT_SIZE)
    assert [product.macs for product in found] == [CONV1, CONV2, HEAD]
    assert int8_macs(found) == 0.0


@pytest.mark.parametrize(("ops", "share"), [(None, 1.0), (["Gemm"], HEAD / (CONV1 + CONV2 + HEAD))])
def test_the_share_in_int8_is_that_of_the_session(tmp_path, ops, share):
    target = tmp_path / "int8.onnx"
    quantize_static_int8(write_network(tmp_path / "fp32.onnx"), target, images=[noise(4)], ops=ops)
    found = products(target, INPUT_SIZE)
    assert sum(product.macs for product in found) == CONV1 + CONV2 + HEAD
    assert int8_macs(found) == pytest.approx(share)


def test_products_of_two_activations_and_grouped_convolutions_are_counted(tmp_path):
    weights = {"w": np.ones((6, 1, 3, 3), np.float32), "out": np.ones((16, 5), np.float32)}
    nodes = [
        helper.make_node("Conv", ["images", "w"], ["a"], group=3, pads=[1, 1, 1, 1], name="depthwise"),
        helper.make_node("Transpose", ["a"], ["b"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["a", "b"], ["c"], name="square"),  # six products of 16 x 16 x 16
        helper.make_node("MatMul", ["c", "out"], ["d"], name="weighted"),
        helper.make_node("ReduceMean", ["d", "axes"], ["logits"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", *INPUT_SIZE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 5])],
        [
            *(numpy_helper.from_array(value, name) for name, value in weights.items()),
            numpy_helper.from_array(np.array([1, 2]), "axes"),
        ],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    found = products(path, INPUT_SIZE)
    assert [product.macs for product in found] == [6 * 16 * 16 * 9, 6 * 16**3, 6 * 16 * 16 * 5]


def test_the_time_of_each_operator_is_told_longest_first(tmp_path):
    found = seconds_by_operator(write_network(tmp_path / "fp32.onnx", width=64), INPUT_SIZE)
    assert "Conv" in next(iter(found))
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert 0 < sum(found.values()) < 1
