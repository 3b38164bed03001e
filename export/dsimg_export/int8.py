"""Static int8 of an ONNX file by ONNX Runtime's own tools, with the settings that are fast and close to fp32."""

import itertools
import platform
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from dsimg.errors import ModelError
from dsimg.run import replacing
from dsimg_export.session import INPUT, open_session

# Softmax, layer norm and GELU stay in float: with them in int8 a small ViT's relative error was 0.44 instead of 0.04.
TRANSFORMER_OPS = ("Conv", "Gemm", "MatMul")
# Without Relu and Clip each of them runs in float between two conversions: MobileNetV2 was as slow as in fp32; without
# Mul, which gates and SiLU need, EfficientNet-B0 slower.
CONVOLUTIONAL_OPS = (
    *("Conv", "Gemm", "MatMul", "Relu", "Clip", "Add", "Mul", "Concat"),
    *("MaxPool", "AveragePool", "GlobalAveragePool"),
)


class _Batches:
    """Batches of images, one at a time, as ONNX Runtime's calibration asks for them."""

    def __init__(self, images: Iterable[NDArray[np.float32]]) -> None:
        self.images = iter(images)

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        batch = next(self.images, None)
        return None if batch is None else {INPUT: batch}


def quantize_static_int8(
    source: Path, target: Path, *, images: Iterable[NDArray[np.float32]], ops: Sequence[str] | None = None
) -> None:
    """Write the fp32 ONNX file `source` in int8 to `target`, atomically: QDQ, one scale an output channel of weights.

    images: batches (N, 3, H, W) of normalised training images, read once; an activation's range is the least and the
    greatest value seen, two numbers a batch, so that memory does not grow with the images. ops: the operators to
    quantize, `default_ops(source)` unless given. Activations are unsigned on x86, where signed ones run 2.5 times
    slower, and signed on ARM.

    Raises ModelError: a file that ONNX Runtime cannot run, no images, a disk that refuses.
    """
    open_session(source)  # ONNX Runtime's tools would go on without what they could not read
    batches = iter(images)
    first = next(batches, None)
    if first is None:
        raise ModelError(f"there are no images to calibrate {source} on. Give at least one batch of training images.")
    on_arm = platform.machine().lower() in ("arm64", "aarch64")
    try:
        with replacing(target) as temporary, tempfile.TemporaryDirectory(prefix="dsimg-") as folder:
            prepared = Path(folder) / "prepared.onnx"
            # Fuses what int8 kernels have as one; symbolic shapes would need sympy, and the file has its shapes.
            quant_pre_process(source, prepared, skip_symbolic_shape=True)
            quantize_static(
                prepared,
                temporary,
                _Batches(itertools.chain([first], batches)),
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=list(ops or default_ops(source)),
                per_channel=True,
                activation_type=QuantType.QInt8 if on_arm else QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                calibrate_method=CalibrationMethod.MinMax,
            )
    except OSError as error:
        raise ModelError(f"cannot write {target}: {error}. Free some space there or choose another --out.") from error
    except Exception as error:  # ONNX Runtime's tools raise any type on what they do not know
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ModelError(f"ONNX Runtime cannot quantize {source} ({reason}). Serve it in fp32.") from error


def default_ops(source: Path) -> tuple[str, ...]:
    """Return the operators to quantize: few in a network with layer norm or softmax, more in a convolutional one."""
    found = {node.op_type for node in onnx.load(source).graph.node}
    return TRANSFORMER_OPS if found & {"LayerNormalization", "Softmax"} else CONVOLUTIONAL_OPS
