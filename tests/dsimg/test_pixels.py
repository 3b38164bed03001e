"""dsimg.pixels: the pixels of the one decoder and of Pillow's resizing, sooner."""

import itertools
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from dsimg.errors import ImageError
from dsimg.pixels import decode_rgb, resize
from dsimg.preprocess import decode
from tests.dsimg.pictures import encoded, picture, settings
from tests.dsimg.zoo import make_zoo


def exif(orientation: int, kind: int = 3) -> bytes:
    entry = struct.pack(">HHIHH", 0x0112, kind, 1, orientation, 0)
    return b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", 1) + entry + b"\0\0\0\0"


def with_segment(jpeg: bytes, payload: bytes) -> bytes:
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(payload) + 2) + payload + jpeg[2:]


JPEG = encoded(picture(0, 50, 30), quality=90)
XMP = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'
ODD_FILES = {
    "plain": JPEG,
    "progressive": encoded(picture(1, 50, 30), progressive=True),
    "no chroma reduction": encoded(picture(1, 50, 30), subsampling=0),
    "grey": encoded(picture(2, 50, 30).convert("L")),
    "cmyk": encoded(picture(3, 50, 30).convert("CMYK")),
    "png": encoded(picture(4, 50, 30), "PNG"),
    "transparent png": encoded(picture(4, 50, 30).convert("LA"), "PNG"),
    "xmp orientation": with_segment(JPEG, XMP),
    "stray bytes at the end": JPEG + b"\0\0",
    "long orientation": with_segment(JPEG, exif(6, kind=4)),
    "broken exif": with_segment(JPEG, exif(6)[:20]),
    **{f"exif {value}": with_segment(JPEG, exif(value)) for value in range(10)},
}


@pytest.mark.parametrize("name", ODD_FILES)
def test_pixels_are_those_of_the_one_decoder(tmp_path: Path, name: str) -> None:
    path = tmp_path / "file.JPEG"
    path.write_bytes(ODD_FILES[name])
    expected = np.asarray(decode(ODD_FILES[name])).astype(int)
    pixels = decode_rgb(path)
    assert pixels.dtype == np.uint8
    assert pixels.shape == expected.shape
    assert np.abs(pixels - expected).max() <= 1


def test_rotated_files_are_not_all_alike() -> None:
    """Or the test above would show nothing."""
    assert np.asarray(decode(ODD_FILES["exif 6"])).shape == (50, 30, 3)
    assert np.asarray(decode(ODD_FILES["exif 1"])).shape == (30, 50, 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (JPEG[: len(JPEG) // 2], "truncated"),
        (JPEG[:-2], "truncated"),
        (b"<html></html>", "not an image"),
        (b"\xff\xd8\xff\xe0\xff\xd9", "truncated"),
    ],
)
def test_unusable_files_give_their_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.jpg").write_bytes(content)
    with pytest.raises(ImageError, match=reason):
        decode_rgb(tmp_path / "x.jpg")


def test_a_missing_file_is_unusable_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="cannot be read: No such file or directory"):
        decode_rgb(tmp_path / "gone.jpg")


def test_every_file_of_the_zoo_decodes_as_the_one_decoder_does(tmp_path: Path) -> None:
    expect = make_zoo(tmp_path / "zoo")
    decoded = 0
    for row in expect["files"]:
        path = tmp_path / "zoo" / row["path"]
        expected = outcome(lambda path: np.asarray(decode(path.read_bytes())), path)
        found = outcome(decode_rgb, path)
        if isinstance(expected, str):
            assert found == expected
            continue
        assert not isinstance(found, str)
        assert np.abs(found.astype(int) - expected).max() <= 1, row["path"]
        decoded += 1
    assert decoded > 20


def outcome(make: Callable[[Path], NDArray[np.uint8]], path: Path) -> NDArray[np.uint8] | str:
    """Return an image, or the reason why there is none."""
    try:
        return make(path)
    except ImageError as error:
        return str(error)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "lanczos", "nearest"])
def test_crops_are_resized_as_pillow_does_it(interpolation: str) -> None:
    sizes = itertools.product((17, 40, 64, 97, 200), repeat=2)
    for number, (height, width) in enumerate(sizes):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        preprocess = settings(input_size=(3, 40, 56), interpolation=interpolation)
        method = getattr(Image.Resampling, interpolation.upper())
        theirs = np.asarray(Image.fromarray(noise).resize((56, 40), method)).astype(int)
        difference = np.abs(resize(noise, preprocess) - theirs)
        assert difference.max() <= 1, (height, width)
        assert difference.mean() < 0.02, (height, width)  # 0.2 with the passes in the other order


def test_the_fast_decoder_is_used_without_its_deprecation_warning(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(JPEG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode_rgb(tmp_path / "x.jpg")
    assert callable(torch.ops.image.decode_jpeg)
