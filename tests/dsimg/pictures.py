"""Helpers of the tests that read images: preprocess values, pictures, splits of small JPEGs."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dsimg.augment import Augmentation
from dsimg.folder import Split
from dsimg.preprocess import Preprocess

PADDED = Augmentation(name="standard", size=(32, 32), geometry="padded_crop")
RESIZED = Augmentation(name="strong", size=(32, 32))


def settings(size: int = 32, **changes: Any) -> Preprocess:
    """Return values for images of `size` pixels, `changes` among them."""
    values: dict[str, Any] = {
        "input_size": (3, size, size),
        "mean": (0.5, 0.4, 0.3),
        "std": (0.2, 0.3, 0.25),
        "crop_pct": 1.0,
    }
    return Preprocess(**values | changes)


def picture(index: int, width: int = 32, height: int = 32) -> Image.Image:
    """Return a smooth picture that no other index has."""
    coarse = np.random.default_rng(index).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """Return the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_split(
    folder: Path,
    count: int,
    *,
    classes: int = 3,
    size: Callable[[int], tuple[int, int]] = lambda index: (32, 32),
    broken: tuple[int, ...] = (),
) -> Split:
    """Write `count` JPEGs of `size(index)` (width, height) into class folders; those in `broken` are cut short."""
    files = []
    labels = np.sort(np.arange(count) % classes)
    for index, label in enumerate(labels.tolist()):
        file = f"class{label}/{index:05}.jpg"
        content = encoded(picture(index, *size(index)), quality=90)
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content[: len(content) // 2] if index in broken else content)
        files.append(file)
    return Split(folder, tuple(files), labels.astype(np.int64))
