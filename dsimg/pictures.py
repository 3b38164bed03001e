"""Pictures to compare networks with: of a data set, or made up; torch is not needed."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from dsimg.errors import DataError, ImageError
from dsimg.folder import Split, find_labelled, is_folder, read_index
from dsimg.preprocess import Preprocess, decode
from dsimg.run import Run

COUNT = 32


def find_pictures(
    run: Run | None, data: str | None, *, classes: Sequence[str], preprocess: Preprocess
) -> tuple[list[bytes], str]:
    """Return at most COUNT encoded images, at least two, and in words where they are from.

    They are of `data`, else of those that the run was measured on, else made up. The last one lies on its side by its
    EXIF. Raises DataError: images of `data`, or an index, that cannot be read; RunError: a damaged index.
    """
    why = "no --data"
    if data is not None:
        split = find_labelled(Path(data), classes)[0]
        found, reason = _decodable(split)
        if not found:
            raise DataError(f"{_none_of(split)} ({reason}). Give other images with --data.")
        return found, _where(split, found)
    if run is not None:
        why += f", and {run.path} keeps no list of images"
        if run.has("index"):
            split = read_index(run.file("index")).val
            if is_folder(split.folder):
                found, reason = _decodable(split)
                if found:
                    return found, _where(split, found)
                why = f"no --data, and {_none_of(split)} ({reason})"
            else:
                why = f"no --data, and {split.folder} is not there"
    side = round(preprocess.input_size[1] / preprocess.crop_pct)
    made = [_made_up(side, seed) for seed in range(COUNT)]
    return [*(_encoded(picture, "PNG") for picture in made[:-1]), _turned(made[-1])], f"{COUNT} made-up pictures: {why}"


def _decodable(split: Split) -> tuple[list[bytes], str]:
    """Return files of a split that can be decoded, spread over it, and one of them turned; or why the first cannot."""
    step = max(len(split.files) // COUNT, 1)
    found: list[bytes] = []
    first = ""
    for start in range(step):
        for file in split.files[start::step]:
            try:
                data = (split.folder / file).read_bytes()
                decode(data)
            except (ImageError, OSError) as error:
                first = first or f"{file}: {getattr(error, 'strerror', None) or error}"
                continue
            found.append(data)
            if len(found) == COUNT - 1:
                break
        if found:
            return [*found, _turned(decode(found[0]))], ""
    return [], first


def _where(split: Split, found: Sequence[bytes]) -> str:
    return f"{len(found) - 1} of {split.folder}, and one turned"


def _none_of(split: Split) -> str:
    return f"none of the {len(split.files):,} images in {split.folder} can be decoded"


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
