"""Changes to an exported ONNX model that need no torch: pixels as its input, half precision, what it says of itself."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

from dsimg.errors import ModelError
from dsimg.preprocess import Preprocess
from dsimg.run import replacing
from dsimg_export.session import INPUT

# Sums over many values and exponentials: half precision has 11 bits and ends at 65504.
SENSITIVE = ("Softmax", "LayerNormalization", "ReduceMean", "ReduceSum", "GlobalAveragePool", "Exp", "Pow", "Sqrt")
# The nodes that `take_pixels` puts before the network: exact in float, and never to be quantized.
PIXEL_STEPS = ("pixels_transpose", "pixels_cast", "pixels_scale", "pixels_shift")

# What a file says of itself whose answer to an image depends on what else is in the batch.
DEPENDS_ON_BATCH = "dsimg.depends_on_batch"


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Write one ONNX file, atomically. Raises ModelError where the disk refuses."""
    try:
        with replacing(path) as temporary:
            onnx.save(model, temporary)
    except OSError as error:
        raise ModelError(f"cannot write {path}: {error}. Free some space there or choose another --out.") from error


def take_pixels(model: onnx.ModelProto, preprocess: Preprocess) -> None:
    """Make the model's input `images` pixels (N, H, W, 3) uint8, as a decoder gives them, in place: scaling and
    normalisation are computed in the graph, value by value as `preprocess.normalise` does."""
    _, height, width = preprocess.input_size
    inner = f"{INPUT}_normalised"
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name == INPUT:
                node.input[place] = inner
    std, mean = (np.array(values, np.float64).reshape(1, 3, 1, 1) for values in (preprocess.std, preprocess.mean))
    constants = {f"{INPUT}_scale": 1 / (255 * std), f"{INPUT}_shift": mean / std}
    model.graph.initializer.extend(
        numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()
    )
    transpose, cast, scale, shift = PIXEL_STEPS
    steps = [
        helper.make_node("Transpose", [INPUT], [f"{INPUT}_planes"], name=transpose, perm=[0, 3, 1, 2]),
        helper.make_node("Cast", [f"{INPUT}_planes"], [f"{INPUT}_float"], name=cast, to=TensorProto.FLOAT),
        helper.make_node("Mul", [f"{INPUT}_float", f"{INPUT}_scale"], [f"{INPUT}_scaled"], name=scale),
        helper.make_node("Sub", [f"{INPUT}_scaled", f"{INPUT}_shift"], [inner], name=shift),
    ]
    for place, node in enumerate(steps):
        model.graph.node.insert(place, node)
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    described = helper.make_tensor_value_info(INPUT, TensorProto.UINT8, [batch, height, width, 3])
    model.graph.input[0].CopyFrom(described)


def to_half(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in half precision, but for sums and exponentials; its input and output keep their types."""
    half: onnx.ModelProto = convert_float_to_float16(
        model,
        keep_io_types=True,
        op_block_list=[*DEFAULT_OP_BLOCK_LIST, *SENSITIVE],
    )
    return half


def describe(model: onnx.ModelProto, values: Mapping[str, object]) -> None:
    """Write values as JSON into the model's metadata, in place, so that the file alone can be used."""
    kept = [entry for entry in model.metadata_props if entry.key not in values]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for key, value in values.items():
        model.metadata_props.add(key=key, value=json.dumps(value))
