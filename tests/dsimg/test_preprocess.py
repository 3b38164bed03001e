import io
import json
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from dsimg.errors import ConfigError, ImageError
from dsimg.preprocess import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Preprocess,
    decode,
    normalise,
    preprocess_image,
    resize_and_crop,
)
from tests.dsimg.zoo import make_zoo

# What each `say` of the zoo has to make clear, as the word that our message says it with.
SAID = {
    "truncated or incomplete": "truncated or incomplete",
    "empty file": "empty file",
    "not an image": "not an image",
    "looks like HTML or text": "looks like HTML or text",
    "HEIC/HEIF": "HEIC/HEIF",
    "convert to JPEG or PNG": "convert it to JPEG or PNG",
    "corrupt": "corrupt",
    "too many pixels": "too many pixels",
    "the limit": "the limit of 89,478,485",
    "text/metadata chunk too large": "text/metadata chunk is too large",
    "SVG is not supported": "SVG is not supported",
    "not a JPEG at byte 0": "not a JPEG at byte 0",
}
MUST_DECODE = {"bmp_named_jpg", "no_extension", "one_pixel"}  # where the zoo leaves the choice, ours


def settings(size: int = 32, **changes: Any) -> Preprocess:
    values = {"input_size": (3, size, size), "mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    return Preprocess(**values | changes)


def pixels(image: Image.Image) -> NDArray[np.int64]:
    return np.asarray(image).astype(np.int64)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def corners(width: int = 48, height: int = 32) -> Image.Image:
    """Four colours in four corners: every flip and every turn shows."""
    array = np.zeros((height, width, 3), np.uint8)
    array[: height // 2, : width // 2] = 200, 40, 40
    array[: height // 2, width // 2 :] = 40, 160, 70
    array[height // 2 :, : width // 2] = 40, 70, 190
    array[height // 2 :, width // 2 :] = 220, 200, 60
    return Image.fromarray(array)


def photograph(width: int, height: int) -> Image.Image:
    """Smooth random colours."""
    noise = np.random.default_rng(0).integers(0, 256, (9, 13, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def png(width: int, height: int, *, data: bytes, extra: bytes = b"") -> bytes:
    """An 8-bit RGB PNG whose header may lie."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + _chunk(b"IDAT", zlib.compress(data)) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def test_every_file_of_the_zoo_gets_its_expected_answer(tmp_path: Path) -> None:
    cases = make_zoo(tmp_path / "zoo")["files"]
    wrong = []
    for case in cases:
        action = case["train"]["action"]
        try:
            image = decode((tmp_path / "zoo" / case["path"]).read_bytes())
        except ImageError as error:
            clear = all(SAID[say] in str(error) for say in case["train"]["say"])
            if action == "decode" or case["id"] in MUST_DECODE or not clear:
                wrong.append((case["id"], str(error)))
            continue
        if action in ("skip", "ignore"):
            wrong.append((case["id"], "decoded"))
            continue
        with Image.open(tmp_path / "zoo" / case["reference"]) as file:
            reference = file.convert("RGB")
        difference = np.abs(pixels(image) - pixels(reference)).mean() if image.size == reference.size else 255
        if image.mode != "RGB" or difference > case["max_mean_abs_diff"]:
            wrong.append((case["id"], f"differs by {difference}"))
    assert wrong == []
    assert len(cases) == 46


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_in_every_format(kind: str, orientation: int) -> None:
    how_cameras_store_it = {
        1: lambda image: image,
        2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda image: image.transpose(Image.Transpose.ROTATE_180),
        4: lambda image: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda image: image.transpose(Image.Transpose.TRANSPOSE),
        6: lambda image: image.transpose(Image.Transpose.ROTATE_90),
        7: lambda image: image.transpose(Image.Transpose.TRANSVERSE),
        8: lambda image: image.transpose(Image.Transpose.ROTATE_270),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(how_cameras_store_it[orientation](corners()), kind, exif=exif.tobytes())
    image = decode(data)
    assert image.size == (48, 32)
    assert np.abs(pixels(image) - pixels(corners())).mean() < 6


def test_damaged_exif_leaves_the_pixels_as_they_are() -> None:
    data = encoded(corners(), exif=b"Exif\0\0II*\0\xff\xff\xff\xffnonsense")
    assert (pixels(decode(data)) == pixels(corners())).all()


def test_sixteen_bit_grey_is_scaled_not_clipped() -> None:
    levels = np.array([[0, 128, 257, 32896, 65535]], np.uint16)
    for kind in ("PNG", "TIFF"):
        image = decode(encoded(Image.fromarray(levels), kind))
        assert pixels(image)[0].tolist() == [[0] * 3, [0] * 3, [1] * 3, [128] * 3, [255] * 3]


@pytest.mark.parametrize(
    ("levels", "grey"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 127.6, 254.0], [0, 128, 254]),
        ([0.0, 257.0, 65535.0], [0, 1, 255]),
    ],
)
def test_float_pixels_are_scaled_by_the_smallest_range_that_holds_them(levels: list[float], grey: list[int]) -> None:
    image = decode(encoded(Image.fromarray(np.array([levels], np.float32)), "TIFF"))
    assert pixels(image)[0].tolist() == [[level] * 3 for level in grey]


@pytest.mark.parametrize(
    ("levels", "found"),
    [
        ([-1.0, 1.0], "from -1 to 1,"),
        ([0.0, 1e6], "from 0 to 1e+06,"),
        ([float("nan"), 0.0], "from nan to nan,"),
    ],
)
def test_float_pixels_of_no_known_scale_are_refused(levels: list[float], found: str) -> None:
    with pytest.raises(ImageError, match="save it with 8 bits a channel") as caught:
        decode(encoded(Image.fromarray(np.array([levels], np.float32)), "TIFF"))
    assert found in str(caught.value)


def test_thirty_two_bit_integers_hold_sixteen_or_are_refused() -> None:
    image = decode(encoded(Image.fromarray(np.array([[0, 65535]], np.int32)), "TIFF"))
    assert pixels(image)[0].tolist() == [[0] * 3, [255] * 3]
    with pytest.raises(ImageError, match="from 0 to 65536,"):
        decode(encoded(Image.fromarray(np.array([[0, 65536]], np.int32)), "TIFF"))


def test_cmyk_is_not_inverted() -> None:
    image = decode(encoded(corners().convert("CMYK"), "JPEG", quality=95, subsampling=0))
    assert np.abs(pixels(image) - pixels(corners())).mean() < 3


def test_transparency_goes_on_white_in_every_mode() -> None:
    rgba = Image.new("RGBA", (4, 2), (250, 0, 250, 0))  # a colour that must not show
    rgba.paste((10, 20, 30, 255), (0, 0, 2, 2))
    grey = Image.new("LA", (4, 2), (0, 0))
    grey.paste((10, 255), (0, 0, 2, 2))
    palette = Image.new("P", (4, 2), 1)
    palette.putpalette([10, 20, 30, 250, 0, 250])
    palette.paste(0, (0, 0, 2, 2))
    keyed = Image.new("RGB", (4, 2), (250, 0, 250))
    keyed.paste((10, 20, 30), (0, 0, 2, 2))
    for data, shown in (
        (encoded(rgba), [10, 20, 30]),
        (encoded(rgba, "WEBP", lossless=True), [10, 20, 30]),
        (encoded(grey), [10, 10, 10]),
        (encoded(palette, transparency=b"\xff\0"), [10, 20, 30]),
        (encoded(palette, transparency=1), [10, 20, 30]),
        (encoded(palette, "GIF", transparency=1), [10, 20, 30]),
        (encoded(keyed, transparency=(250, 0, 250)), [10, 20, 30]),
    ):
        assert pixels(decode(data))[0].tolist() == [shown, shown, [255] * 3, [255] * 3]
    half = decode(encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 51))))
    assert pixels(half)[0, 0].tolist() == [204, 204, 204]


def test_one_bit_becomes_black_and_white() -> None:
    bits = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
    assert pixels(decode(encoded(bits)))[0].tolist() == [[0] * 3, [255] * 3]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_the_first_frame_of_an_animation_is_taken(kind: str) -> None:
    first, second = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    image = decode(encoded(first, kind, save_all=True, append_images=[second]))
    assert np.abs(pixels(image) - [255, 0, 0]).max() <= 4


def test_a_bomb_is_refused_from_its_header() -> None:
    with pytest.raises(ImageError, match=r"^too many pixels: far above the limit of 89,478,485; save a smaller copy$"):
        decode(png(50_000, 50_000, data=bytes(1000)))
    with pytest.raises(ImageError, match=r"^too many pixels: 13000x13000 is above the limit of 89,478,485; "):
        decode(png(13_000, 13_000, data=bytes(1000)))
    with pytest.raises(ImageError, match=r"^too many pixels: 48x32 is above the limit of 1,535; "):
        decode(encoded(corners()), max_pixels=48 * 32 - 1)
    assert decode(encoded(corners()), max_pixels=48 * 32).size == (48, 32)


def _flipped(data: bytes) -> bytes:
    at = data.index(b"IDAT") + 20
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: b"", "empty file"),
        (lambda: encoded(photograph(64, 64), "JPEG")[:-40], "truncated or incomplete"),
        (lambda: encoded(photograph(64, 64), "JPEG")[:-2], "truncated or incomplete"),
        (lambda: encoded(photograph(64, 64), "JPEG")[:100], "truncated or incomplete"),
        (lambda: encoded(photograph(64, 64))[:20], "truncated or incomplete"),
        (lambda: encoded(photograph(64, 64))[:-400], "truncated or incomplete"),
        (lambda: encoded(photograph(64, 64), "AVIF")[:40], "truncated or incomplete"),
        (lambda: _flipped(encoded(photograph(64, 64))), "corrupt"),
        (lambda: b"<!DOCTYPE html><html><body>404 <svg></svg></body></html>", "looks like HTML or text"),
        (lambda: "BMW und Öl\n".encode(), "looks like HTML or text"),
        (lambda: b"\xef\xbb\xbf<?xml version='1.0'?>\n<svg></svg>", "SVG is not supported"),
        (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC/HEIF is not supported"),
        (lambda: b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom", "a film or the like"),
        (lambda: b"%PDF-1.7\n%\xe2\xe3", "PDF is not supported"),
        (lambda: b"\r\n" + encoded(corners(), "JPEG"), "not a JPEG at byte 0: 2 stray bytes"),
        (lambda: b"\n" + encoded(corners()), "not a PNG at byte 0: 1 stray bytes"),
        (lambda: bytes(range(64)), "not an image in a supported format"),
        (lambda: encoded(corners(), "EPS"), "PostScript is not supported"),
        (
            lambda: png(1, 1, data=bytes(4), extra=_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(2**21)))),
            "text/metadata chunk is too large",
        ),
    ],
)
def test_what_is_not_a_whole_image_is_refused_with_its_reason(make: Callable[[], bytes], reason: str) -> None:
    with pytest.raises(ImageError) as caught:
        decode(make())
    assert reason in str(caught.value)


def test_no_damage_to_a_file_raises_anything_but_an_image_error() -> None:
    rng = np.random.default_rng(1)
    for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM", "JPEG2000", "ICO", "QOI"):
        data = encoded(corners(), kind)
        refused = 0
        for _ in range(100):
            damaged = bytearray(data[: rng.integers(1, len(data) + 1)])
            damaged[rng.integers(min(len(damaged), 200))] = rng.integers(256)
            try:
                assert decode(bytes(damaged)).mode == "RGB"
            except ImageError:
                refused += 1
        assert refused > 0, kind


def test_warnings_of_pillow_never_leak_even_as_errors_in_threads() -> None:
    broken_exif = encoded(corners(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x40\0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            pytest.warns(UserWarning, match="Corrupt EXIF data"),
            Image.open(io.BytesIO(broken_exif)) as image,
        ):
            image.getexif()
        results: list[tuple[int, int]] = []
        threads = [threading.Thread(target=lambda: results.append(decode(broken_exif).size)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [(48, 32)] * 8


@pytest.mark.parametrize("size", [(500, 375), (333, 500), (64, 48), (40, 1), (1, 1), (256, 256), (257, 4096)])
@pytest.mark.parametrize(("crop_pct", "short_side"), [(0.875, 256), (224 / 232, 232), (0.95, 235), (1.0, 224)])
def test_geometry_is_resize_then_centre_crop(size: tuple[int, int], crop_pct: float, short_side: int) -> None:
    image = photograph(*size)
    width, height = size
    if width <= height:  # torchvision's rule: the long side is rounded down
        resized = image.resize((short_side, int(short_side * height / width)), Image.Resampling.BILINEAR)
    else:
        resized = image.resize((int(short_side * width / height), short_side), Image.Resampling.BILINEAR)
    left, top = round((resized.width - 224) / 2), round((resized.height - 224) / 2)
    expected = pixels(resized.crop((left, top, left + 224, top + 224)))
    result = resize_and_crop(image, settings(224, crop_pct=crop_pct))
    assert result.shape == (224, 224, 3)
    assert result.dtype == np.uint8
    difference = np.abs(result - expected)
    assert difference.max() <= 2  # one resampling rounds once, two steps twice
    assert (difference > 1).mean() < 1e-4


def test_a_wide_input_covers_both_sides() -> None:
    wide = settings(input_size=(3, 32, 64), crop_pct=1.0)
    result = resize_and_crop(corners(64, 64), wide)
    assert result.shape == (32, 64, 3)
    assert (result == pixels(corners(64, 64))[16:48]).all()


def test_an_image_of_the_right_size_is_untouched() -> None:
    image = photograph(32, 32)
    assert (resize_and_crop(image, settings(32, crop_pct=1.0, interpolation="lanczos")) == pixels(image)).all()


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_each_interpolation_is_pillows(interpolation: str) -> None:
    image = photograph(90, 90)
    expected = image.resize((30, 30), Image.Resampling[interpolation.upper()])
    result = resize_and_crop(image, settings(30, crop_pct=1.0, interpolation=interpolation))
    assert (result == pixels(expected)).all()


def test_normalised_values_and_layout() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8)
    expected = ((images / 255 - IMAGENET_MEAN) / IMAGENET_STD).transpose(0, 3, 1, 2)
    result = normalise(images, settings())
    assert result.dtype == np.float32
    assert result.flags.c_contiguous
    assert result.shape == (3, 3, 4, 5)
    assert np.abs(result - expected).max() < 1e-6


def test_one_image_gives_the_same_bits_alone_and_in_a_batch() -> None:
    files = [encoded(photograph(50 + i, 40), "JPEG") for i in range(3)]
    batch = normalise(np.stack([resize_and_crop(decode(data), settings()) for data in files]), settings())
    for data, row in zip(files, batch, strict=True):
        alone = preprocess_image(data, settings())
        assert alone.shape == (3, 32, 32)
        assert alone.tobytes() == row.tobytes()


def test_settings_survive_json() -> None:
    value = settings(224, interpolation="bicubic", crop_pct=0.95)
    text = json.dumps(value.as_dict())
    assert json.loads(text) == {
        "input_size": [3, 224, 224],
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bicubic",
        "crop_pct": 0.95,
    }
    assert Preprocess.from_dict(json.loads(text)) == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"input_size": (224, 224, 3)},
            "input_size is (224, 224, 3); write (3, height, width) in whole pixels.",
        ),
        ({"input_size": (3, 0, 8)}, "input_size is (3, 0, 8); write (3, height, width) in whole pixels."),
        ({"mean": (0.5, 0.5)}, "mean is (0.5, 0.5); write three numbers, one a channel."),
        ({"std": (1.0, float("nan"), 1.0)}, "std is (1.0, nan, 1.0); write three numbers, one a channel."),
        ({"std": (1.0, 0.0, 1.0)}, "std is (1.0, 0.0, 1.0); every value must be above 0."),
        (
            {"interpolation": "bicubik"},
            "interpolation is 'bicubik' (choose from nearest, bilinear, bicubic, lanczos), did you mean 'bicubic'?",
        ),
        ({"crop_pct": 87.5}, "crop_pct is 87.5; it must be above 0 and at most 1."),
    ],
)
def test_wrong_settings_are_refused_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(**changes)
    assert str(caught.value) == f"preprocess: {message}"


def test_a_wrong_dictionary_is_refused_with_the_key() -> None:
    good = settings().as_dict()
    with pytest.raises(ConfigError, match=r"unknown key 'crop_pkt' \(known: .*\), did you mean 'crop_pct'\?$"):
        Preprocess.from_dict(good | {"crop_pkt": 1.0})
    with pytest.raises(ConfigError, match=r"^preprocess: missing std; "):
        Preprocess.from_dict({key: value for key, value in good.items() if key != "std"})
    with pytest.raises(ConfigError, match=r"^preprocess: mean is 0\.5; write a list of three numbers\.$"):
        Preprocess.from_dict(good | {"mean": 0.5})
