"""Write a trained network as one ONNX file, with proof that it says what the network says.

dsimg export --source RUN --out RUN2
"""

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import nn

from dsimg import cli, models
from dsimg.console import bytes_text, count_text
from dsimg.errors import ConfigError, ModelError, RunError
from dsimg.folder import is_folder
from dsimg.pictures import find_pictures
from dsimg.plan import Network
from dsimg.preprocess import Preprocess, decode, normalise, resize_and_crop
from dsimg.run import Run
from dsimg.to_onnx import OPSET, Parity, check_half, exported, parity
from dsimg.weights import load_weights, open_network
from dsimg_export.golden import COUNT, record
from dsimg_export.onnx_file import describe, save_model, take_pixels, to_half
from dsimg_export.stage import copy_described, run_short

# The largest error accepted, as a share of the largest logit and of what images make a logit differ. fp32: 28
# architectures, pruned, were within 3.5e-6 of the largest logit; beyond this something is wrong.
LIMITS = {"fp32": {"of_peak": 1e-3, "of_spread": 0.05}, "fp16": {"of_peak": 0.05, "of_spread": 0.1}}


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The flags of `dsimg export`."""

    source: str
    """The run to export; or weights of torchvision's (ResNet50_Weights.DEFAULT), or package.module:function that
    returns a trained network, which need no run."""
    out: Path
    """The run folder to write."""
    data: str | None = None
    """Images for the comparison with PyTorch and for the golden images that go into the run. Default: those that the
    run was measured on; without any, made-up pictures."""
    opset: int = OPSET
    """The version of ONNX's operators. 18 and later."""
    dtype: Literal["fp32", "fp16"] = "fp32"
    """fp16 is for GPUs: weights and most operators in half precision, sums and exponentials in fp32."""
    uint8_input: bool = False
    """Let the file take pixels (N, H, W, 3) uint8, and scale and normalise them itself."""
    labels: Path | None = None
    """For a source that is no run: a file with the name of each logit's class, a line each."""
    preprocess: Path | None = None
    """For a source that is no run: a JSON with input_size, mean, std, interpolation, crop_pct, in timm's sense.
    Default: what its weights say, or ImageNet's at 224 pixels."""
    overwrite: bool = False
    """Replace the run in --out."""


@dataclass(frozen=True)
class _Source:
    """What is exported: a run's network, or one that has no run."""

    run: Run | None
    network: Network
    classes: tuple[str, ...]
    encoded: list[bytes]  # images to compare with; the last one lies on its side
    images_from: str


def export(config: ExportConfig) -> Run:
    """Write a network as one ONNX file for any batch size, compared with PyTorch, in a run folder."""
    run = Run.open(Path(config.source)) if is_folder(Path(config.source)) else None
    if run is not None and (config.labels or config.preprocess):
        raise ConfigError(f"{config.source} is a run, which has its classes and preprocess: no --labels, --preprocess.")
    return run_short(
        config,
        stage="export",
        parents=[] if run is None else [run],
        prepare=lambda: _open(config, run),
        body=lambda out, source: _export(config, source, out),
    )


def _export(config: ExportConfig, source: _Source, out: Run) -> None:
    terminal = cli.context().terminal
    arch, model, preprocess = source.network.arch, source.network.model, source.network.preprocess
    terminal.table(
        "plan",
        [
            ("source", config.source if config.source == arch else f"{config.source}: {arch}"),
            ("model", f"{count_text(models.count_parameters(model))} parameters, {len(source.classes)} classes"),
            ("file", f"opset {config.opset}, {config.dtype}, {_input_text(config, preprocess)}"),
            ("images", source.images_from),
        ],
    )
    copy_described(source.run, out, source.classes)
    path = out.path / "model.onnx"
    pixels = np.stack([resize_and_crop(decode(data), preprocess) for data in source.encoded])
    proto = exported(model, input_size=preprocess.input_size, opset=config.opset)
    if config.dtype == "fp16":
        check_half(proto, normalise(pixels, preprocess))
    save_model(_to_file(config, source, proto), path)
    found, note = _compare(config, source, path, pixels)
    golden = record(_spread(source.encoded), {"model": path}, preprocess=preprocess, classes=source.classes)
    golden.save(out.path / "golden.safetensors")
    metrics = {
        "opset": config.opset,
        "dtype": config.dtype,
        "parity": vars(found),
        "parity_images": source.images_from,
    }
    out.finish(seed=None, model=source.network.described(source.classes), metrics=metrics)
    same = f"the same Top-1 on {found.same_top1:.1%} of {len(pixels)} images"
    rows = [
        ("parity", f"max error {found.max_error:.2g}, relative {found.relative_error:.2g}, at batch 1, 2, 3 and 8"),
        ("", same if found.same_top1 == 1 else f"{same}; the others lie between two classes, within that error"),
        *([("", note)] if note else []),
        ("size", bytes_text(path.stat().st_size)),
        ("run", str(out.path)),
    ]
    terminal.table("result", rows)


def _spread(encoded: Sequence[bytes]) -> list[bytes]:
    """Return the golden images, COUNT at most, none twice: the last one, which is turned, and others from all over."""
    upright = encoded[:-1]
    return [*upright[:: max(len(upright) // (COUNT - 1), 1)][: COUNT - 1], encoded[-1]]


def _open(config: ExportConfig, run: Run | None) -> _Source:
    network, classes = _network(config, run)
    network.model.eval()
    encoded, where = find_pictures(run, config.data, classes=classes, preprocess=network.preprocess)
    return _Source(run, network, classes, encoded, where)


def _network(config: ExportConfig, run: Run | None) -> tuple[Network, tuple[str, ...]]:
    """Return the source's network and classes."""
    if run is not None:
        if run.has("model"):
            raise RunError(f"{run.path} has an ONNX file already. Give the run that it was exported from.")
        block = run.model
        preprocess = Preprocess.from_dict(block["preprocess"])
        return Network(arch=block["arch"], model=open_network(run), preprocess=preprocess), tuple(block["classes"])
    if "_Weights." in config.source:
        arch, weights = models.arch_of_weights(config.source)
        preprocess = _preprocess(config, models.default_preprocess(arch, image_size=None, weights=config.source))
        classes = _labels(config) or tuple(weights.meta["categories"])
        model = models.build_model(arch, num_classes=len(classes), input_size=preprocess.input_size[1])
        if not load_weights(model, config.source, arch=arch, classes=classes).head_kept:
            raise ConfigError(f"--labels names {len(classes)} classes, and {config.source} has others. Leave it out.")
        return Network(arch=arch, model=model, preprocess=preprocess), classes
    if ":" in config.source:
        labels = _labels(config)
        if labels is None:
            raise ConfigError(f"{config.source} does not say what its classes are called. Give --labels a file.")
        preprocess = _preprocess(config, models.default_preprocess(config.source, image_size=None))
        model = models.build_model(config.source, num_classes=len(labels))
        models.check_input_size(model, preprocess.input_size[1], config.source, num_classes=len(labels))
        return Network(arch=config.source, model=model, preprocess=preprocess), labels
    raise RunError(
        f"--source {config.source} is no run folder, no weights of torchvision's such as ResNet50_Weights.DEFAULT, and "
        "not package.module:function."
    )


def _labels(config: ExportConfig) -> tuple[str, ...] | None:
    if config.labels is None:
        return None
    try:
        names = tuple(config.labels.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --labels {config.labels}: {error}. Give a text file.") from error
    if len(names) < 2 or len(set(names)) != len(names) or not all(names):
        raise ConfigError(f"--labels {config.labels} must have a line for each class, all different, at least two.")
    return names


def _preprocess(config: ExportConfig, default: Preprocess) -> Preprocess:
    if config.preprocess is None:
        return default
    try:
        given = json.loads(config.preprocess.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read --preprocess {config.preprocess}: {error}. Give a JSON file.") from error
    if not isinstance(given, dict):
        raise ConfigError(f'--preprocess {config.preprocess} must hold a JSON object, such as {{"crop_pct": 0.9}}.')
    return Preprocess.from_dict({**default.as_dict(), **given})


def _input_text(config: ExportConfig, preprocess: Preprocess) -> str:
    _, height, width = preprocess.input_size
    if config.uint8_input:
        return f"input (N, {height}, {width}, 3) uint8, normalised in the file"
    return f"input (N, 3, {height}, {width}) float32, normalised"


def _to_file(config: ExportConfig, source: _Source, proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a network, exported in fp32, as --dtype and --uint8_input ask for it."""
    if config.dtype == "fp16":
        proto = to_half(proto)
    if config.uint8_input:
        take_pixels(proto, source.network.preprocess)
    said = source.network.described(source.classes)
    describe(proto, {f"dsimg.{key}": said[key] for key in ("arch", "classes", "preprocess")})
    return proto


def _compare(config: ExportConfig, source: _Source, path: Path, pixels: NDArray[np.uint8]) -> tuple[Parity, str]:
    """Return how the file differs from the network, and a note. Raises ModelError where it says something else.

    A network that says the same of every image would agree with any file: then its head gets random weights, and so
    does a copy of the file, which is compared instead.
    """
    model, preprocess = source.network.model, source.network.preprocess
    images = torch.from_numpy(normalise(pixels, preprocess))
    given = torch.from_numpy(pixels) if config.uint8_input else None
    found = parity(model, path, images, pixels=given)
    note = ""
    if found.vacuous:
        twin = _with_random_head(model)
        proto = exported(twin, input_size=preprocess.input_size, opset=config.opset)
        with tempfile.TemporaryDirectory(prefix="dsimg-") as folder:
            beside = Path(folder) / "random_head.onnx"
            save_model(_to_file(config, source, proto), beside)
            found = parity(twin, beside, images, pixels=given)
        if found.vacuous:
            raise ModelError(
                f"{config.source} says the same of every image, whatever its last layer is: nothing could show that an "
                "ONNX file agrees with it. Train it first."
            )
        note = "the network says the same of every image (is it trained?): compared with a random head"
        cli.context().terminal.warn(note)
    if not found.within(**LIMITS[config.dtype]):
        raise ModelError(
            f"the ONNX file says something else than the network: max error {found.max_error:.3g}, relative "
            f"{found.relative_error:.3g}, where images differ by {found.spread:.3g}, the same Top-1 on "
            f"{found.same_top1:.1%}. "
            + ("Half precision is too coarse for it; give --dtype fp32." if config.dtype == "fp16" else "Report it.")
        )
    return found, note


def _with_random_head(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for name in models.head_names(twin):
        for parameter in twin.get_submodule(name).parameters(recurse=False):
            parameter.data = torch.randn(parameter.shape, generator=generator) / 16
    return twin


if __name__ == "__main__":
    cli.run(export)
