"""What the templates of `dsimg deploy` say of a network, read from its ONNX file and its run."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from dsimg.console import bytes_text
from dsimg.errors import ModelError, RunError
from dsimg.preprocess import Preprocess
from dsimg.run import Run
from dsimg_export.onnx_file import DEPENDS_ON_BATCH
from dsimg_export.session import load_model, precision_of
from dsimg_export.verify import LIMITS

DATATYPES = {
    onnx.TensorProto.FLOAT: "FP32",
    onnx.TensorProto.FLOAT16: "FP16",
    onnx.TensorProto.UINT8: "UINT8",
}


@dataclass(frozen=True)
class Tensor:
    """What an ONNX file takes or gives, without the batch."""

    name: str
    datatype: str  # as the Open Inference Protocol calls it
    dims: tuple[int, ...]


def network_values(run: Run, role: str) -> dict[str, Any]:
    """Return what there is to say of the network, from its file. Raises RunError, ModelError."""
    path = run.file(role)
    proto = load_model(path)
    given, answered = tensors_of(proto, path)
    block = run.model
    if answered.dims != (len(block["classes"]),):
        raise RunError(
            f"{path} gives logits of {answered.dims}, and run.json names {len(block['classes'])} classes. Copy the run "
            "again."
        )
    preprocess = Preprocess.from_dict(block["preprocess"])
    precision = precision_of(proto)
    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    size = path.stat().st_size
    # Of dynamic int8 an image's answer would depend on its neighbours.
    alone = any(entry.key == DEPENDS_ON_BATCH for entry in proto.metadata_props)
    return {
        "arch": block["arch"],
        "classes": len(block["classes"]),
        "file_text": f"{path.name}, {precision}, {bytes_text(size)}{_processors(run, role, precision)}",
        "opset": opset,
        "ir": proto.ir_version,
        **({"max_batch": 1} if alone else {}),
        "input": given,
        "input_name": json.dumps(given.name),
        "input_type": given.datatype,
        "input_dims": ", ".join(map(str, given.dims)),
        "output_name": json.dumps(answered.name),
        "output_type": answered.datatype,
        "output_dims": ", ".join(map(str, answered.dims)),
        "height": preprocess.input_size[1],
        "width": preprocess.input_size[2],
        "crop_pct": preprocess.crop_pct,
        "interpolation": preprocess.interpolation.upper(),
        "mean": preprocess.mean,
        "std": preprocess.std,
        "preprocess_steps": _steps(preprocess, given),
        "spread": LIMITS[precision].spread,
        "peak": LIMITS[precision].peak,
        "tmp_mib": 64 + 2 * math.ceil(size / 2**20),  # `dsimg verify` writes the graph that it runs
    }


def _processors(run: Run, role: str, precision: str) -> str:
    if role == "reduced":
        return ", with 7-bit weights: for x86 processors without VNNI, and right on all others too"
    if precision == "int8" and run.has("reduced"):
        return ", for processors that sum int8 exactly (VNNI, ARM) and GPUs; for others: --instruction_set avx2"
    return ""


def _steps(preprocess: Preprocess, given: Tensor) -> str:
    """Return a list, in Markdown, of what turns an image into the network's input."""
    _, height, width = preprocess.input_size
    covered = " x ".join(str(math.floor(side / preprocess.crop_pct + 1e-6)) for side in (height, width))
    steps = [
        "decode; turn upright as EXIF says; put transparent parts on white; RGB",
        f"resize until it just covers {covered} (height x width): {preprocess.interpolation}, antialiased, as Pillow "
        "does",
        f"cut {height} x {width} out of the middle",
    ]
    if given.datatype == "UINT8":
        steps.append(f"`{given.name}` is (N, {height}, {width}, 3), UINT8, of 0 to 255, red first; the file normalises")
    else:
        steps.append(f"(pixel / 255 - mean) / std; mean {list(preprocess.mean)}, std {list(preprocess.std)}, red first")
        steps.append(f"`{given.name}` is (N, 3, {height}, {width}), {given.datatype}")
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


def tensors_of(proto: Any, path: Path) -> tuple[Tensor, Tensor]:
    """Return the input and the output of an ONNX model, which takes any batch size. Raises ModelError."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in weights]
    outputs = list(proto.graph.output)
    if (len(inputs), len(outputs)) != (1, 1):
        raise ModelError(
            f"{path} has {len(inputs)} inputs and {len(outputs)} outputs; an image classifier has one of each. Give a "
            "run of `dsimg export`."
        )
    return _tensor(inputs[0], path), _tensor(outputs[0], path)


def _tensor(value: Any, path: Path) -> Tensor:
    kind = value.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or "?") for dim in kind.shape.dim]
    dims = tuple(size for size in sizes[1:] if isinstance(size, int))
    if not sizes or isinstance(sizes[0], int) or len(dims) != len(sizes) - 1:
        raise ModelError(
            f"{path}: '{value.name}' has the shape {sizes}; only its first size, the batch, is to be open. `dsimg "
            "export` writes such a file."
        )
    if kind.elem_type not in DATATYPES:
        found = onnx.TensorProto.DataType.Name(kind.elem_type)
        raise ModelError(
            f"{path}: '{value.name}' is {found}; it can be {', '.join(DATATYPES.values())}. Export it again."
        )
    return Tensor(value.name, DATATYPES[kind.elem_type], dims)


def warm_sizes(max_batch: int, *, gpu: bool) -> list[int]:
    """Return the batch sizes to run before the first request: on a GPU cuDNN looks for algorithms at each anew."""
    doubled = [2**power for power in range(max_batch.bit_length())] if gpu else [1]
    return sorted({*doubled, max_batch})


def warm_up(size: int, given: Tensor) -> str:
    """Return an entry of Triton's `model_warmup`: a batch of zeros."""
    data = f"data_type: TYPE_{given.datatype} dims: [ {', '.join(map(str, given.dims))} ] zero_data: true"
    inputs = f"inputs {{ key: {json.dumps(given.name)} value: {{ {data} }} }}"
    return f'  {{ name: "batch_{size}" batch_size: {size} {inputs} }}'
