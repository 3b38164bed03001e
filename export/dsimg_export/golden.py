"""Golden images: a few encoded images kept in a run, with what each step on the way to the logits made of them.

On another machine the same steps are taken again, and the first that differs is named: decoding, orientation, resizing,
normalising, the network. `golden.safetensors` holds, for N images: `encoded_I` their bytes; `upright` (N, 2) height and
width of the decoded pictures and `thumbnail` (N, 16, 16, 3) means of their blocks; `pixels` (N, H, W, 3) resized and
cropped; `normalised` (N, 3, h, w) every eighth of the values; `logits_ROLE` (N, C) what each file of the run said.
"""

import json
import platform
from collections.abc import Mapping, Sequence
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
from dsimg.errors import RunError
from dsimg.preprocess import Preprocess, decode, normalise, resize_and_crop
from dsimg.run import replacing
from dsimg_export.cpu import int8_is_exact
from dsimg_export.served import logits_of
from dsimg_export.session import open_session

COUNT = 6  # images in a run
SIDE = 16  # of a thumbnail
EVERY = 8  # of the normalised values, which depend on one pixel each
MADE_BY = "made_by"


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
        made_by=machine(),
    )


def machine() -> dict[str, Any]:
    """Return what the figures of a session depend on besides its file."""
    return {
        "dsimg": dsimg.__version__,
        "onnxruntime": onnxruntime.__version__,
        "pillow": PIL.__version__,
        "processor": platform.machine(),
        "int8": "exact" if int8_is_exact() else "saturating",
        "provider": "cpu",
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
    """Return the means of a picture's 16 x 16 blocks as (16, 16, 3) of 0..255: alike for all decoders."""
    bands = [band.convert("F").resize((SIDE, SIDE), Image.Resampling.BOX) for band in picture.split()]
    return np.stack([np.asarray(band, np.float32) for band in bands], axis=2)
