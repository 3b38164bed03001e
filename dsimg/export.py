"""Write a trained network as one ONNX file, with proof that it says what the network says.

dsimg export --source RUN --out RUN2
"""

import copy
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image
from torch import nn

from dsimg import cli, models
from dsimg.console import bytes_text, count_text
from dsimg.errors import ConfigError, DsimgError, ImageError, ModelError, RunError
from dsimg.folder import Split, find_labelled, read_index
from dsimg.preprocess import Preprocess, decode, normalise, resize_and_crop
from dsimg.run import Run, read_json
from dsimg.to_onnx import OPSET, Parity, exported, parity
from dsimg.weights import load_weights, open_network
from dsimg_export.golden import COUNT, record
from dsimg_export.onnx_file import describe, save_model, take_pixels, to_half
from dsimg_export.stage import copy_described, run_short

PARITY_IMAGES = 32
# max |difference| / max |logit|. fp32: 28 architectures, pruned, were within 3.5e-6; beyond this something is wrong.
LIMITS = {"fp32": 1e-3, "fp16": 0.05}


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
    arch: str
    model: nn.Module
    preprocess: Preprocess
    classes: tuple[str, ...]


def export(config: ExportConfig) -> Run:
    """Write a network as one ONNX file for any batch size, compared with PyTorch, in a run folder."""
    run = Run.open(Path(config.source)) if Path(config.source).is_dir() else None
    if run is not None and (config.labels or config.preprocess):
        raise ConfigError(f"{config.source} is a run, which has its classes and preprocess: no --labels, --preprocess.")
    return run_short(
        config,
        stage="export",
        parents=[] if run is None else [run],
        body=lambda out: _export(config, run, out),
    )


def _export(config: ExportConfig, run: Run | None, out: Run) -> None:
    terminal = cli.context().terminal
    source = _open(config, run)
    encoded, where = _pictures(config, source)
    terminal.table(
        "plan",
        [
            ("source", f"{config.source}: {source.arch}"),
            ("model", f"{count_text(models.count_parameters(source.model))} parameters, {len(source.classes)} classes"),
            ("file", f"opset {config.opset}, {config.dtype}, {_input_text(config, source.preprocess)}"),
            ("images", where),
        ],
    )
    copy_described(source.run, out, source.classes)
    path = out.path / "model.onnx"
    save_model(_to_file(config, source, source.model), path)
    pixels = np.stack([resize_and_crop(decode(data), source.preprocess) for data in encoded])
    found, note = _compare(config, source, path, pixels)
    block: dict[str, Any] = {
        "arch": source.arch,
        "num_classes": len(source.classes),
        "classes": list(source.classes),
        "preprocess": source.preprocess.as_dict(),
    }
    chosen = [*encoded[:: max(len(encoded) // COUNT, 1)][: COUNT - 1], encoded[-1]]
    golden = record(chosen, {"model": path}, preprocess=source.preprocess, classes=source.classes)
    golden.save(out.path / "golden.safetensors")
    metrics = {"opset": config.opset, "dtype": config.dtype, "parity": vars(found), "parity_images": where}
    out.finish(seed=None, model=block, metrics=metrics)
    rows = [
        ("parity", f"max error {found.max_error:.2g}, relative {found.relative_error:.2g}, at batch 1, 2, 3 and 8"),
        ("", f"the same Top-1 on {found.same_top1:.1%} of {len(pixels)} images"),
        *([("", note)] if note else []),
        ("size", bytes_text(path.stat().st_size)),
        ("run", str(out.path)),
    ]
    terminal.table("result", rows)


def _open(config: ExportConfig, run: Run | None) -> _Source:
    if run is not None:
        if run.has("model"):
            raise RunError(f"{run.path} has an ONNX file already. Give the run that it was exported from.")
        block = run.model
        preprocess = Preprocess.from_dict(block["preprocess"])
        return _Source(run, block["arch"], open_network(run).eval(), preprocess, tuple(block["classes"]))
    if "_Weights." in config.source:
        arch, weights = models.arch_of_weights(config.source)
        preprocess = _preprocess(config, models.default_preprocess(arch, image_size=None, weights=config.source))
        classes = _labels(config) or tuple(weights.meta["categories"])
        model = models.build_model(arch, num_classes=len(classes), input_size=preprocess.input_size[1])
        if not load_weights(model, config.source, arch=arch, classes=classes).head_kept:
            raise ConfigError(f"--labels names {len(classes)} classes, and {config.source} has others. Leave it out.")
        return _Source(None, arch, model.eval(), preprocess, classes)
    if ":" in config.source:
        labels = _labels(config)
        if labels is None:
            raise ConfigError(f"{config.source} does not say what its classes are called. Give --labels a file.")
        preprocess = _preprocess(config, models.default_preprocess(config.source, image_size=None))
        model = models.build_model(config.source, num_classes=len(labels))
        models.check_input_size(model, preprocess.input_size[1], config.source, num_classes=len(labels))
        return _Source(None, config.source, model.eval(), preprocess, labels)
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
    given = read_json(config.preprocess)
    return Preprocess.from_dict({**default.as_dict(), **given})


def _input_text(config: ExportConfig, preprocess: Preprocess) -> str:
    _, height, width = preprocess.input_size
    if config.uint8_input:
        return f"input (N, {height}, {width}, 3) uint8, normalised in the file"
    return f"input (N, 3, {height}, {width}) float32, normalised"


def _to_file(config: ExportConfig, source: _Source, model: nn.Module) -> Any:
    proto = exported(model, input_size=source.preprocess.input_size, opset=config.opset)
    if config.dtype == "fp16":
        proto = to_half(proto)
    if config.uint8_input:
        take_pixels(proto, source.preprocess)
    described = {"classes": list(source.classes), "preprocess": source.preprocess.as_dict(), "arch": source.arch}
    describe(proto, {f"dsimg.{key}": value for key, value in described.items()})
    return proto


def _compare(config: ExportConfig, source: _Source, path: Path, pixels: NDArray[np.uint8]) -> tuple[Parity, str]:
    """Return how the file differs from the network, and a note. Raises ModelError where it says something else.

    A network that says the same of every image would agree with any file: then its head gets random weights, and so
    does a copy of the file, which is compared instead.
    """
    found = _parity(config, source, source.model, path, pixels)
    note = ""
    if found.vacuous:
        twin = copy.deepcopy(source.model)
        for name in models.head_names(twin):
            head = twin.get_submodule(name)
            generator = torch.Generator().manual_seed(0)
            for parameter in head.parameters(recurse=False):
                parameter.data = torch.randn(parameter.shape, generator=generator) / 16
        beside = path.with_name("random_head.onnx")
        try:
            save_model(_to_file(config, source, twin), beside)
            found = _parity(config, source, twin, beside, pixels)
        finally:
            beside.unlink(missing_ok=True)
        if found.vacuous:
            raise ModelError(
                f"{config.source} says the same of every image, whatever its last layer is: nothing could show that an "
                "ONNX file agrees with it. Train it first."
            )
        note = "the network says the same of every image (is it trained?): compared with a random head"
        cli.context().terminal.warn(note)
    if not found.relative_error <= LIMITS[config.dtype]:
        raise ModelError(
            f"the ONNX file says something else than the network: max error {found.max_error:.3g}, relative "
            f"{found.relative_error:.3g}, the same Top-1 on {found.same_top1:.1%}. "
            + ("Its values leave the range of fp16; give --dtype fp32." if config.dtype == "fp16" else "Report it.")
        )
    return found, note


def _parity(config: ExportConfig, source: _Source, model: nn.Module, path: Path, pixels: NDArray[np.uint8]) -> Parity:
    images = torch.from_numpy(normalise(pixels, source.preprocess))
    return parity(model, path, images, pixels=torch.from_numpy(pixels) if config.uint8_input else None)


# --- Pictures ---------------------------------------------------------------------------------------------------


def _pictures(config: ExportConfig, source: _Source) -> tuple[list[bytes], str]:
    """Return encoded images for the comparison, and where they are from; the last one lies on its side by its EXIF."""
    split = _split(config, source)
    found: list[bytes] = []
    if split is not None:
        step = max(len(split.files) // PARITY_IMAGES, 1)
        for file in split.files[::step]:
            try:
                data = (split.folder / file).read_bytes()
                decode(data)
            except (ImageError, OSError):
                continue
            found.append(data)
            if len(found) == PARITY_IMAGES - 1:
                break
    if found:
        return [*found, _turned(decode(found[0]))], f"{len(found)} of {split.folder if split else ''}, and one turned"
    side = round(source.preprocess.input_size[1] / source.preprocess.crop_pct)
    made = [_made_up(side, seed) for seed in range(PARITY_IMAGES)]
    encoded = [_encoded(picture, "PNG") for picture in made[:-1]]
    return [*encoded, _turned(made[-1])], f"{PARITY_IMAGES} made-up pictures: no --data, and the run's is not there"


def _split(config: ExportConfig, source: _Source) -> Split | None:
    if config.data is not None:
        return find_labelled(Path(config.data), source.classes)[0]
    if source.run is None or not source.run.has("index"):
        return None
    try:
        split = read_index(source.run.file("index")).val
    except DsimgError:
        return None
    return split if split.folder.is_dir() else None


def _made_up(side: int, seed: int) -> Image.Image:
    """Return a picture of soft blobs and edges: photographs' kind of spectrum, where noise would be all alike."""
    rng = np.random.default_rng(seed)
    pixels = np.zeros((side, side, 3), np.float32)
    for cells in (2, 4, 8, 16):
        coarse = rng.uniform(-1, 1, (cells, cells, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(coarse[..., channel]).resize((side, side), Image.Resampling.BICUBIC)
            pixels[..., channel] += np.asarray(layer) / np.sqrt(cells)
    top, left = rng.integers(0, side // 2, 2)
    pixels[top : top + side // 3, left : left + side // 3] += rng.uniform(-1, 1, 3).astype(np.float32)
    return Image.fromarray(np.clip(127 + 80 * pixels, 0, 255).astype(np.uint8))


def _encoded(picture: Image.Image, name: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, name, **options)
    return stream.getvalue()


def _turned(picture: Image.Image) -> bytes:
    """Return a JPEG that lies on its side, with the EXIF orientation that sets it upright."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return _encoded(picture.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=90, exif=exif)


if __name__ == "__main__":
    cli.run(export)
