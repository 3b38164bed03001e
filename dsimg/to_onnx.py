"""From PyTorch to ONNX: one file that takes any batch, and how far its logits are from the network's own."""

import ast
import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dsimg.errors import ModelError
from dsimg.models import first_line
from dsimg_export.calibrate import extremes
from dsimg_export.onnx_file import save_model
from dsimg_export.session import INPUT, OUTPUT, open_session

# The exporter's own operators are of 18 and it honours nothing below; 20 is its default and has GELU whole.
OPSET = 20
# protobuf cannot hold more in one file.
MAX_BYTES = 2**31 - 1
# Exported with one image, the batch of a ViT would be baked in, and ConvNeXt and Swin fail: pytorch #133653.
EXAMPLE_BATCH = 2
BATCH = "batch"
MODULES = "pkg.torch.onnx.name_scopes"  # of a node: "['', 'layer1', 'layer1.0', ...]"
PARITY_BATCHES = (1, 2, 3)
PARITY_BATCH = 8
# Logits that differ by less than this share of the largest would hide an error in what rounding does to them: 28 fp32
# architectures were within 3.5e-6 of it.
VACUOUS = 1e-4
HALF_MAX = 65504.0  # the largest number of half precision


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How an ONNX file's logits differ from the network's, the worst over the batch sizes tried.

    Where the best class is another one, the network's own two logits lie within twice `max_error`.
    """

    max_error: float  # max |difference|
    relative_error: float  # max |difference| / max |the network's logits|
    spread: float  # the most that a logit of the network's differs between two images
    same_top1: float  # share of the images with the same best class
    vacuous: bool  # the network says the same of every image, or nothing: agreement proves nothing

    def within(self, *, of_peak: float, of_spread: float) -> bool:
        """Tell whether the error is at most these shares of the largest logit and of the spread; NaN never is."""
        return self.relative_error <= of_peak and self.max_error <= of_spread * self.spread


def to_onnx(model: nn.Module, path: Path, *, input_size: tuple[int, int, int]) -> None:
    """Write the network to one ONNX file of opset `OPSET`, atomically; see `exported`.

    Raises ModelError: over 2 GB, a network that the exporter cannot follow, a disk that refuses.
    """
    save_model(exported(model, input_size=input_size), path)


def exported(model: nn.Module, *, input_size: tuple[int, int, int], opset: int = OPSET) -> onnx.ModelProto:
    """Return the network, as it is in eval mode and fp32, as an ONNX model of the opset asked for.

    Input `images`: (N, 3, H, W) float32, normalised; output `logits`: (N, C); any N. `input_size`: (3, H, W). A copy
    on the CPU is exported; `model` stays as it is. Weights keep their names, and a node's metadata its module's.

    Raises ModelError: over 2 GB, a network that the exporter cannot follow, an opset that it does not write.
    """
    size = sum(4 * tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    if size > MAX_BYTES:
        raise ModelError(
            f"the network has {size / 1e9:.1f} GB of weights in fp32, and one ONNX file holds 2.1 GB. Distil it into a "
            "smaller one, or prune it."
        )
    proto = _export(model, input_size, opset)
    found = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    if found != opset:  # it logs that it failed to convert, and goes on
        raise ModelError(f"torch's exporter wrote opset {found} where {opset} was asked for. Give --opset {found}.")
    return proto


def parity(model: nn.Module, path: Path, images: Tensor, *, pixels: Tensor | None = None) -> Parity:
    """Return how the ONNX file's logits differ from the network's in eval mode and fp32, on normalised `images`.

    images: (N, 3, H, W); pixels: the same as (N, H, W, 3) uint8, for a file that takes those. The file runs on the
    first one, two and three of them and on all, eight at a time; fewer than eight are repeated. A logit that is not
    finite makes the errors NaN. Raises ModelError as `open_session`.
    """
    session = open_session(path)
    network = _twin(model)
    places = torch.arange(max(len(images), PARITY_BATCH)) % len(images)
    images = images.detach().float().cpu()[places]
    with torch.no_grad():
        expected = torch.cat([network(batch) for batch in torch.split(images, PARITY_BATCH)]).numpy()

    def run(batch: Tensor) -> Any:
        return session.run([OUTPUT], {INPUT: batch.numpy()})[0]

    given = images if pixels is None else pixels[places]
    found = np.concatenate([run(batch) for batch in torch.split(given, PARITY_BATCH)])
    answers = [found, *(run(given[:count]) for count in PARITY_BATCHES)]
    max_error = float(np.max([np.abs(answer - expected[: len(answer)]).max() for answer in answers]))
    peak = float(np.abs(expected).max())
    spread = float(np.ptp(expected, axis=0).max())
    once = int(places.max()) + 1
    return Parity(
        max_error=max_error,
        relative_error=max_error / max(peak, float(np.finfo(np.float32).tiny)),
        spread=spread,
        same_top1=float((found.argmax(1) == expected.argmax(1))[:once].mean()),
        vacuous=spread <= VACUOUS * peak,
    )


def check_half(model: onnx.ModelProto, images: NDArray[np.float32]) -> None:
    """Raise ModelError where values between the operators of an fp32 model leave the range of half precision.

    images: (N, 3, H, W), normalised. ONNX Runtime computes half precision in fp32 on a CPU, where nothing overflows,
    so running the file in half precision would not show it.
    """
    with tempfile.TemporaryDirectory(prefix="dsimg-") as folder:
        path = Path(folder) / "fp32.onnx"
        save_model(model, path)
        ranges = extremes(path, [images], ops=sorted({node.op_type for node in model.graph.node}))
    for name, (low, high) in ranges.items():
        peak = max(abs(low), abs(high))
        if peak > HALF_MAX:
            raise ModelError(
                f"the values of {_layer(model, name)} reach {peak:,.0f}, beyond {HALF_MAX:,.0f}: they leave the range "
                "of fp16; give --dtype fp32."
            )


def _layer(model: onnx.ModelProto, tensor: str) -> str:
    """Return the module that computes a tensor, or the tensor's name where that is the network itself."""
    for node in model.graph.node:
        if tensor in node.output:
            modules = next((entry.value for entry in node.metadata_props if entry.key == MODULES), "[]")
            inner = [name for name in ast.literal_eval(modules)[:-1] if name]
            return f"layer '{inner[-1]}'" if inner else f"'{tensor}'"
    return f"'{tensor}'"


def _twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).cpu().float().eval()


def _export(model: nn.Module, input_size: tuple[int, int, int], opset: int) -> onnx.ModelProto:
    try:
        program = torch.onnx.export(
            _twin(model),
            (torch.zeros(EXAMPLE_BATCH, *input_size),),
            dynamo=True,
            opset_version=opset,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: torch.export.Dim(BATCH)},),
            verbose=False,
        )
    except Exception as error:  # the network's own code and three stages of the exporter: any type
        raise ModelError(
            f"the network cannot be exported to ONNX ({_reason(error)}). Change that part of its forward to operators "
            "whose shapes do not depend on values, or take another --model."
        ) from error
    assert program is not None
    proto: onnx.ModelProto = program.model_proto
    shapes = [
        [dim.dim_param or dim.dim_value for dim in output.type.tensor_type.shape.dim] for output in proto.graph.output
    ]
    if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][0] != BATCH:
        raise ModelError(
            f"the network, exported to ONNX, returns {shapes} instead of logits [['{BATCH}', classes]]. Make its "
            "forward return the logits alone, for any number of images."
        )
    _forget_sources(proto)
    return proto


def _forget_sources(proto: onnx.ModelProto) -> None:
    """Drop the exporter's notes, which hold the source's lines and paths, but for the modules that nodes come from."""
    del proto.graph.metadata_props[:]
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        del value.metadata_props[:]
    for tensor in proto.graph.initializer:
        del tensor.metadata_props[:]
    for node in proto.graph.node:
        kept = [entry for entry in node.metadata_props if entry.key == MODULES]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)


def _reason(error: BaseException) -> str:
    """Return the first line of what went wrong first: the exporter wraps it in a page of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(Exception(str(error)))
