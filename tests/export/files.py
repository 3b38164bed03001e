"""Small ONNX files, made without torch."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

INPUT_SIZE = (3, 16, 16)


def write_network(path: Path, *, width: int = 8, softmax: bool = False) -> Path:
    """Write two convolutions with ReLU, a mean over the picture and a linear layer to 5 logits, and return `path`."""
    rng = np.random.default_rng(0)
    shapes = {
        "conv1.weight": (width, 3, 3, 3),
        "conv1.bias": (width,),
        "conv2.weight": (2 * width, width, 3, 3),
        "conv2.bias": (2 * width,),
        "head.weight": (5, 2 * width),
        "head.bias": (5,),
    }
    weights = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    pads = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["images", "conv1.weight", "conv1.bias"], ["a"], name="conv1", **pads),
        helper.make_node("Relu", ["a"], ["b"], name="relu1"),
        helper.make_node("Conv", ["b", "conv2.weight", "conv2.bias"], ["c"], name="conv2", **pads),
        helper.make_node("Relu", ["c"], ["d"], name="relu2"),
        helper.make_node("GlobalAveragePool", ["d"], ["e"], name="pool"),
        helper.make_node("Flatten", ["e"], ["f"], name="flatten"),
        helper.make_node("Gemm", ["f", "head.weight", "head.bias"], ["g"], name="head", transB=1),
        helper.make_node("Softmax" if softmax else "Identity", ["g"], ["logits"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", *INPUT_SIZE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 5])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def noise(count: int, *, seed: int = 0) -> np.ndarray:
    """Return images (count, 3, 16, 16) of normal noise."""
    return np.random.default_rng(seed).standard_normal((count, *INPUT_SIZE), dtype=np.float32)


def fit_head(path: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Train the linear layer of `write_network`'s file by least squares: images (N, 3, 16, 16), labels (N,) in 0..4."""
    model = onnx.load(path)
    model.graph.output.append(helper.make_tensor_value_info("f", TensorProto.FLOAT, ["batch", None]))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    features = session.run(["f"], {"images": images})[0]
    with_bias = np.column_stack([features, np.ones(len(features))])
    solution = np.linalg.lstsq(with_bias, np.eye(5)[labels], rcond=None)[0].astype(np.float32)
    change(path, {"head.weight": solution[:-1].T, "head.bias": solution[-1]})


def change(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Replace weights of an ONNX file."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(weights[tensor.name]), tensor.name))
    onnx.save(model, path)


def weights_of(path: Path) -> dict[str, np.ndarray]:
    """Return the weights of an ONNX file by name."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
