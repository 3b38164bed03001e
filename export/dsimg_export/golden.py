"""Golden images: a few encoded images kept in a run, with what each step on the way to the logits made of them.

On another machine the same steps are taken again, and the first that differs is named: decoding, orientation, resizing,
normalising, the network. `golden.safetensors` holds, for N images: `encoded_I` their bytes; `upright` (N, 2) height and
width of the decoded pictures and `thumbnail` (N, 16, 16, 3) means of their blocks; `pixels` (N, H, W, 3) resized and
cropped; `normalised` (N, 3, h, w) every eighth of the values; `logits_ROLE` (N, C) what each file of the run said.
"""

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import PIL
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import dsimg
from dsimg.errors import ImageError, RunError
from dsimg.machine import int8_is_exact
from dsimg.preprocess import Preprocess, decode, normalise, resize_and_crop
from dsimg.run import replacing
from dsimg.runtime import Provider
from dsimg_export.served import logits_of
from dsimg_export.session import open_session

COUNT = 6  # images in a run
SIDE = 16  # of a thumbnail
EVERY = 8  # of the normalised values, which depend on one pixel each
MADE_BY = "made_by"

# Of 255. Means of blocks: decoders round otherwise than one another, value by value, and that averages out (Pillow's
# and torchvision's agreed to the bit on 40 photographs). Pixels: resizers round each pass (preprocess.resize_and_crop).
THUMBNAIL_TOLERANCE = 1.0
PIXEL_TOLERANCE = 2
# Of the largest value: one multiplication and one subtraction in fp32.
NORMALISED_TOLERANCE = 1e-5
# What turns a thumbnail (16, 16, 3), by what a person would call it.
TURNS: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "upright": lambda picture: picture,
    "mirrored": lambda picture: picture[:, ::-1],
    "upside down": lambda picture: picture[::-1, ::-1],
    "upside down and mirrored": lambda picture: picture[::-1],
    "turned left": lambda picture: np.rot90(picture),
    "turned right": lambda picture: np.rot90(picture, -1),
    "turned left and mirrored": lambda picture: np.rot90(picture)[:, ::-1],
    "turned right and mirrored": lambda picture: np.rot90(picture, -1)[:, ::-1],
}


@dataclass(frozen=True)
class Views:
    """What each step made of N images."""

    upright: NDArray[np.int64]  # (N, 2) height, width
    thumbnail: NDArray[np.float32]  # (N, 16, 16, 3)
    pixels: NDArray[np.uint8]  # (N, H, W, 3)
    normalised: NDArray[np.float32]  # (N, 3, ceil(H / 8), ceil(W / 8))


@dataclass(frozen=True)
class Golden:
    """Images with the views and the logits that were made of them, and on what (versions, provider, instructions)."""

    encoded: tuple[bytes, ...]
    views: Views
    logits: Mapping[str, NDArray[np.float32]]  # by the role of the file: (N, C)
    classes: tuple[str, ...]
    made_by: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write the file, atomically. Raises RunError where the disk refuses."""
        tensors: dict[str, NDArray[Any]] = {
            f"encoded_{place}": np.frombuffer(data, np.uint8) for place, data in enumerate(self.encoded)
        }
        tensors |= {name: np.ascontiguousarray(getattr(self.views, name)) for name in Views.__dataclass_fields__}
        tensors |= {f"logits_{role}": np.ascontiguousarray(value) for role, value in self.logits.items()}
        described = {MADE_BY: json.dumps(dict(self.made_by)), "classes": json.dumps(self.classes)}
        try:
            with replacing(path) as temporary:
                save_file(tensors, temporary, metadata=described)
        except (OSError, SafetensorError) as error:
            raise RunError(f"cannot write {path}: {error}. Free some space or choose another --out.") from error


def read_golden(path: Path) -> Golden:
    """Read what `Golden.save` wrote. Raises RunError."""
    try:
        with safe_open(path, framework="numpy") as stream:
            described = stream.metadata()
            names = list(stream.keys())
            tensors = {name: stream.get_tensor(name) for name in names}
        count = sum(name.startswith("encoded_") for name in names)
        return Golden(
            encoded=tuple(tensors[f"encoded_{place}"].tobytes() for place in range(count)),
            views=Views(**{name: tensors[name] for name in Views.__dataclass_fields__}),
            logits={name.removeprefix("logits_"): tensors[name] for name in names if name.startswith("logits_")},
            classes=tuple(json.loads(described["classes"])),
            made_by=json.loads(described[MADE_BY]),
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} does not hold golden images ({error}). Export the run again.") from error


def record(
    encoded: Sequence[bytes], files: Mapping[str, Path], *, preprocess: Preprocess, classes: Sequence[str]
) -> Golden:
    """Return golden images with what this machine makes of them; files: the ONNX files by role. Raises ImageError."""
    views = views_of(encoded, preprocess)
    return Golden(
        encoded=tuple(encoded),
        views=views,
        logits={role: logits_of(open_session(path), views.pixels, preprocess) for role, path in files.items()},
        classes=tuple(classes),
        made_by=made_on(),
    )


def made_on(provider: Provider = "cpu") -> dict[str, Any]:
    """Return what the figures of a session depend on besides its file."""
    return {
        "dsimg": dsimg.__version__,
        "onnxruntime": onnxruntime.__version__,
        "pillow": PIL.__version__,
        "processor": platform.machine(),
        "int8": "exact" if provider != "cpu" or int8_is_exact() else "saturating",
        "provider": provider,
    }


def views_of(encoded: Sequence[bytes], preprocess: Preprocess) -> Views:
    """Take the steps from encoded images to the network's input here. Raises ImageError."""
    pictures = [decode(data) for data in encoded]
    pixels = np.stack([resize_and_crop(picture, preprocess) for picture in pictures])
    return Views(
        upright=np.array([(picture.height, picture.width) for picture in pictures], np.int64),
        thumbnail=np.stack([thumbnail(picture) for picture in pictures]),
        pixels=pixels,
        normalised=normalise(pixels, preprocess)[:, :, ::EVERY, ::EVERY],
    )


def thumbnail(picture: Image.Image) -> NDArray[np.float32]:
    """Return the means of a picture's 16 x 16 blocks as (16, 16, 3) of 0..255: alike for all decoders.

    By area, to the part of a pixel, so that a turned picture has the turned thumbnail; Pillow's box filter gives a
    pixel on an edge to one side.
    """
    down, across = _block_means(picture.height), _block_means(picture.width)
    bands = [down @ np.asarray(band, np.float32) @ across.T for band in picture.split()]
    return np.stack(bands, axis=2)


def _block_means(count: int) -> NDArray[np.float32]:
    """Return the matrix (16, count) that takes `count` values to the means of 16 equal parts."""
    edges = np.linspace(0, count, SIDE + 1)
    pixels = np.arange(count)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    shares: NDArray[np.float32] = (np.clip(overlap, 0, None) * SIDE / count).astype(np.float32)
    return shares


# --- What differs here ------------------------------------------------------------------------------------------
# Each function takes one step here, says how far it is from the recorded one, and raises RunError where that is too
# far. Normalising and the network start from the recorded pixels, so that nothing earlier adds to what they show.


def decoded_here(golden: Golden) -> list[Image.Image]:
    """Return the pictures as this machine decodes them, the same as those recorded but for the way they lie."""
    pictures = []
    for number, data in enumerate(golden.encoded, 1):
        try:
            picture = decode(data)
        except ImageError as error:
            raise RunError(f"golden image {number} cannot be decoded here: {error}.") from error
        height, width = golden.views.upright[number - 1].tolist()
        if sorted(picture.size) != sorted((width, height)):
            raise RunError(
                f"golden image {number} is {picture.width}x{picture.height} here, and was {width}x{height} where it "
                "was recorded. Install the Pillow that the run names."
            )
        apart = min(_apart(turn(thumbnail(picture)), golden, number) for turn in TURNS.values())
        if apart > THUMBNAIL_TOLERANCE:
            raise RunError(
                f"golden image {number} has other colours here: block means up to {apart:.1f} of 255 apart, more than "
                f"{THUMBNAIL_TOLERANCE:g}. Install the Pillow that the run names."
            )
        pictures.append(picture)
    return pictures


def compare_orientation(golden: Golden, pictures: Sequence[Image.Image]) -> str:
    """Return how many pictures lie as recorded, which is all of them."""
    for number, picture in enumerate(pictures, 1):
        found = thumbnail(picture)
        size = (picture.height, picture.width)
        if _apart(found, golden, number) > THUMBNAIL_TOLERANCE or size != tuple(golden.views.upright[number - 1]):
            # The size settles what a picture of equal blocks leaves open.
            swapped = size != tuple(golden.views.upright[number - 1])
            apart = {
                name: _apart(turn(found), golden, number)
                for name, turn in TURNS.items()
                if not swapped or name.startswith("turned")
            }
            back = min(apart, key=lambda name: apart[name])
            raise RunError(
                f"golden image {number} lies another way here: it would have to be {back}. Something ignores or "
                "repeats its EXIF orientation."
            )
    return f"{len(pictures)} images lie as recorded"


def compare_resizing(golden: Golden, pictures: Sequence[Image.Image], preprocess: Preprocess) -> str:
    """Return how far resized and cropped pixels are from those recorded."""
    _, height, width = preprocess.input_size
    expected = golden.views.pixels
    if expected.shape[1:3] != (height, width):
        raise RunError(
            f"run.json has an input of {height}x{width}, and the golden images were resized to "
            f"{expected.shape[1]}x{expected.shape[2]}. Copy run.json again."
        )
    found = np.stack([resize_and_crop(picture, preprocess) for picture in pictures])
    apart = np.abs(found.astype(np.int16) - expected)
    if apart.max() > PIXEL_TOLERANCE:
        raise RunError(
            f"resized pixels are up to {apart.max()} of 255 apart ({apart.mean():.2f} on average), more than "
            f"{PIXEL_TOLERANCE}, with interpolation {preprocess.interpolation} and crop_pct {preprocess.crop_pct}. "
            "Copy run.json again, or install the Pillow that the run names."
        )
    return f"{height}x{width}, {_steps(int(apart.max()))}"


def compare_normalising(golden: Golden, preprocess: Preprocess) -> str:
    """Return how far the recorded pixels, normalised here, are from those normalised there."""
    expected = golden.views.normalised
    found = normalise(golden.views.pixels, preprocess)[:, :, ::EVERY, ::EVERY]
    apart = np.abs(found - expected)
    if not apart.max() <= NORMALISED_TOLERANCE * np.abs(expected).max():
        channel = int(apart.max(axis=(0, 2, 3)).argmax())
        raise RunError(
            f"normalised pixels are up to {apart.max():.3g} apart, most in {('red', 'green', 'blue')[channel]}: the "
            f"mean {list(preprocess.mean)} and std {list(preprocess.std)} in run.json are not those of the recording. "
            "Copy run.json again."
        )
    return f"up to {apart.max():.1g} apart" if apart.any() else "to the bit"


@dataclass(frozen=True, kw_only=True)
class Limit:
    """How far logits may be apart: the larger of the two."""

    spread: float  # as a share of how far they differ from image to image: what answers are made of
    peak: float  # as a share of the largest: what a value is rounded to, however alike the images' logits are


def compare_logits(expected: NDArray[np.float32], found: NDArray[np.float32], *, limit: Limit | None) -> str:
    """Return how far logits (N, C) are from those expected, as a share of their spread; beyond `limit`, raise RunError.

    The spread is the largest range of a class over the images, not the largest logit: a bias that is much larger than
    what the images change would hide any error. Of one image it is the largest logit.
    """
    if found.shape != expected.shape:
        raise RunError(f"the network gives logits {found.shape}, not {expected.shape} as recorded. Copy the run again.")
    if not (np.isfinite(found).all() and np.isfinite(expected).all()):
        text = (
            f"logits of {_not_finite(found)} of {len(found)} images are not finite, and of {_not_finite(expected)} in "
            "what they are compared with"
        )
        if limit is None:
            return text
        raise RunError(text)
    apart = float(np.abs(found - expected).max())
    peak = float(np.abs(expected).max())
    spread = float(np.ptp(expected, axis=0).max()) if len(expected) > 1 else peak
    same = int((found.argmax(1) == expected.argmax(1)).sum())
    if apart and not spread:
        how = f"up to {apart:.2g} apart, which were alike for all images"
    else:
        how = f"up to {apart / spread:.2g} of their spread apart" if apart else "to the bit"
    text = f"logits {how}, the same Top-1 on {same} of {len(expected)}"
    if limit is None:
        return text
    if apart > max(limit.spread * spread, limit.peak * peak):
        raise RunError(f"{text}; more than {limit.spread:g} is not rounding")
    if spread <= limit.peak * peak:
        text += "; they differ no more from image to image, which proves little"
    return text


def _not_finite(logits: NDArray[np.float32]) -> int:
    return int((~np.isfinite(logits)).any(axis=1).sum())


def _apart(found: NDArray[np.float32], golden: Golden, number: int) -> float:
    return float(np.abs(found - golden.views.thumbnail[number - 1]).max())


def _steps(count: int) -> str:
    return "to the bit" if count == 0 else f"up to {count} of 255 apart"
