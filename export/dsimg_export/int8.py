"""int8 of an ONNX file by ONNX Runtime's own tools, with the settings that are fast and close to fp32."""

import contextlib
import logging
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationMethod, QuantType, quantize_dynamic
from onnxruntime.quantization.calibrate import TensorData, TensorsData
from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
from onnxruntime.quantization.shape_inference import quant_pre_process

from dsimg.errors import ModelError
from dsimg.machine import is_arm
from dsimg.run import replacing
from dsimg_export.calibrate import Range, extremes
from dsimg_export.onnx_file import DEPENDS_ON_BATCH, PIXEL_STEPS, describe
from dsimg_export.session import load_model, open_session, precision_of

# Softmax, layer norm and GELU stay in float: with them in int8 a small ViT's relative error was 0.44 instead of 0.04.
TRANSFORMER_OPS = ("Conv", "Gemm", "MatMul")
# Without Relu and Clip each of them runs in float between two conversions: MobileNetV2 was as slow as in fp32; without
# Mul, which gates and SiLU need, EfficientNet-B0 slower.
CONVOLUTIONAL_OPS = (
    *("Conv", "Gemm", "MatMul", "Relu", "Clip", "Add", "Mul", "Concat"),
    *("MaxPool", "AveragePool", "GlobalAveragePool"),
)
DYNAMIC_OPS = ("MatMul", "Gemm")
FOLDED = ("Relu", "Clip")  # into the operator before them
METADATA = "dsimg."
Activation = Literal["uint8", "int8"]


def quantize_static_int8(
    source: Path, target: Path, *, images: Iterable[NDArray[np.float32]], ops: Sequence[str] | None = None
) -> None:
    """Write the fp32 ONNX file `source` in int8 to `target`, atomically: QDQ, one scale an output channel of weights.

    images: batches (N, 3, H, W) of normalised training images, read once; an activation's range is the least and the
    greatest value seen. ops: the operators to quantize, `default_ops(source)` unless given.

    Raises ModelError: a file that ONNX Runtime cannot run, no images, a disk that refuses.
    """
    chosen = tuple(ops or default_ops(source))
    with tempfile.TemporaryDirectory(prefix="dsimg-") as folder:
        prepared = Path(folder) / source.name
        prepare(source, prepared)
        write_static(prepared, target, extremes(prepared, images, ops=chosen), ops=chosen)


def default_ops(source: Path) -> tuple[str, ...]:
    """Return the operators to quantize: few in a network with layer norm or softmax, more in a convolutional one.

    Raises ModelError: not a whole ONNX file.
    """
    return TRANSFORMER_OPS if is_transformer(source) else CONVOLUTIONAL_OPS


def is_transformer(source: Path) -> bool:
    """Tell whether a network has layer norm or softmax. Raises ModelError: not a whole ONNX file."""
    operators = {node.op_type for node in load_model(source).graph.node}
    return not {"LayerNormalization", "Softmax"}.isdisjoint(operators)


def check_is_fp32(source: Path) -> None:
    """Raise ModelError where a file holds int8 already, or half precision."""
    precision = precision_of(load_model(source))
    if precision == "int8":
        raise ModelError(f"{source} is in int8 already. Give the fp32 run that it was made from.")
    if precision == "fp16":
        raise ModelError(f"{source} is in half precision. Export the run again with --dtype fp32, then quantize that.")


def prepare(source: Path, target: Path) -> None:
    """Write `source` as the quantizer needs it: BatchNorm and constants folded, shapes inferred, every node with a
    name of its own. Without this int8 is slower than fp32. Raises ModelError."""
    open_session(source)  # ONNX Runtime's tools would go on without what they could not read
    with _tools(source, target):
        # Symbolic shapes would need sympy, and the file has its shapes.
        quant_pre_process(source, target, skip_symbolic_shape=True)
        model = onnx.load(target)
        seen: set[str] = set()
        for place, node in enumerate(model.graph.node):
            if not node.name or node.name in seen:
                node.name = f"{node.op_type}_{place}"
            seen.add(node.name)
        # torch notes the shapes of weights too; the tools turn a Gemm's weight over, and then refuse its old shape.
        weights = {tensor.name for tensor in model.graph.initializer}
        kept = [value for value in model.graph.value_info if value.name not in weights]
        del model.graph.value_info[:]
        model.graph.value_info.extend(kept)
        onnx.save(model, target)


def layers(prepared: Path, ops: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the nodes that are quantized and can be kept in float, in the graph's order."""
    return tuple(
        node.name
        for node in onnx.load(prepared).graph.node
        if node.op_type in ops and node.op_type not in FOLDED and node.name not in PIXEL_STEPS
    )


def activation_type() -> Activation:
    """Return the type of static files' activations here: unsigned on x86, where signed ones run 2.5 times slower, and
    signed on ARM."""
    return "int8" if is_arm() else "uint8"


def write_static(
    prepared: Path,
    target: Path,
    ranges: Mapping[str, Range],
    *,
    ops: Sequence[str],
    exclude: Collection[str] = (),
    reduce_range: bool = False,
) -> None:
    """Write a prepared file in int8, atomically: QDQ with these ranges of activations, but for the nodes in `exclude`.

    Weights are signed, a scale an output channel, in 7 bits with `reduce_range`; activations are of `activation_type`.
    Raises ModelError.
    """
    data = {name: TensorData(lowest=np.float32(low), highest=np.float32(high)) for name, (low, high) in ranges.items()}
    with _tools(prepared, target), replacing(target) as temporary:
        model = onnx.load(prepared)
        quantizer = QDQQuantizer(
            model,
            True,  # per channel
            reduce_range,
            QuantType.QInt8,
            QuantType.QUInt8 if activation_type() == "uint8" else QuantType.QInt8,
            TensorsData(CalibrationMethod.MinMax, data),
            [],  # nodes to quantize: those of the operators
            [*exclude, *PIXEL_STEPS],
            list(ops),
            {},
        )
        quantizer.quantize_model()
        _save(quantizer.model.model, prepared, temporary)


def write_dynamic(prepared: Path, target: Path, *, exclude: Collection[str] = (), reduce_range: bool = False) -> None:
    """Write a prepared file with the weights of its matrix products in int8, atomically; their inputs' ranges are
    measured anew in each run, over the whole batch, which the file says of itself (DEPENDS_ON_BATCH).
    Convolutions stay in float: so quantized they are far slower. Raises ModelError."""
    # A Gemm is split into a product and a sum, whose names end so.
    excluded = [name for one in exclude for name in (one, f"{one}_MatMul")]
    with _tools(prepared, target), replacing(target) as temporary:
        quantize_dynamic(
            prepared,
            temporary,
            op_types_to_quantize=list(DYNAMIC_OPS),
            per_channel=True,
            reduce_range=reduce_range,
            weight_type=QuantType.QInt8,
            nodes_to_exclude=excluded,
        )
        model = onnx.load(temporary)
        _save(model, prepared, temporary, said={DEPENDS_ON_BATCH: True})


def _save(model: onnx.ModelProto, prepared: Path, target: Path, *, said: Mapping[str, object] | None = None) -> None:
    """Write a quantized model with what its source says of itself and what is `said`, and nothing that the tools noted
    for one another."""
    kept = [entry for entry in onnx.load(prepared).metadata_props if entry.key.startswith(METADATA)]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    describe(model, said or {})
    onnx.save(model, target)


@contextlib.contextmanager
def _tools(source: Path, target: Path) -> Iterator[None]:
    """Turn what ONNX Runtime's tools raise into a ModelError, and keep their advice about other settings quiet."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot write {target}, or a temporary file for it: {error}. Free some space there; --out and TMPDIR name "
            "other places."
        ) from error
    except Exception as error:  # any type, on what they do not know
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ModelError(f"ONNX Runtime cannot quantize {source} ({reason}). Serve it in fp32.") from error
    finally:
        root.setLevel(level)
