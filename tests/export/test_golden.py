import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from dsimg.errors import ImageError, RunError
from dsimg.preprocess import TRANSPOSE, Preprocess, decode, normalise, resize_and_crop
from dsimg_export import golden
from dsimg_export.golden import Limit, read_golden, record, thumbnail
from dsimg_export.session import open_session
from tests.export.files import write_network
from tests.export.golden_runs import encoded_pictures, picture
from tests.export.runs import CLASSES, PREPROCESS

PLAIN = Preprocess.from_dict(PREPROCESS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = write_network(tmp_path_factory.mktemp("network") / "model.onnx")
    return record(encoded_pictures(), {"model": path}, preprocess=PLAIN, classes=CLASSES)


def test_what_is_recorded_is_each_step_of_the_one_preprocess(recorded, tmp_path):
    pictures = [decode(data) for data in encoded_pictures()]
    # The third lies on its side in the file, and upright when decoded.
    assert recorded.views.upright.tolist() == [[24, 40], [24, 40], [40, 24]]
    pixels = np.stack([resize_and_crop(one, PLAIN) for one in pictures])
    np.testing.assert_array_equal(recorded.views.pixels, pixels)
    np.testing.assert_array_equal(recorded.views.normalised, normalise(pixels, PLAIN)[:, :, ::8, ::8])
    session = open_session(write_network(tmp_path / "model.onnx"))
    expected = session.run(["logits"], {"images": normalise(pixels, PLAIN)})[0]
    np.testing.assert_array_equal(recorded.logits["model"], expected)


def test_a_file_of_golden_images_is_read_as_it_was_written(recorded, tmp_path):
    recorded.save(tmp_path / "golden.safetensors")
    found = read_golden(tmp_path / "golden.safetensors")
    assert found.encoded == recorded.encoded == tuple(encoded_pictures())
    assert (found.classes, found.made_by) == (tuple(CLASSES), recorded.made_by)
    for name in ("upright", "thumbnail", "pixels", "normalised"):
        np.testing.assert_array_equal(getattr(found.views, name), getattr(recorded.views, name))
    np.testing.assert_array_equal(found.logits["model"], recorded.logits["model"])
    assert list(found.logits) == ["model"]


def test_a_damaged_file_and_a_full_disk_are_named(recorded, tmp_path):
    (tmp_path / "golden.safetensors").write_bytes(b"nothing")
    with pytest.raises(RunError, match=r"golden\.safetensors does not hold golden images \(.+\)\. Export"):
        read_golden(tmp_path / "golden.safetensors")
    with pytest.raises(RunError, match=r"cannot write .*missing/golden\.safetensors"):
        recorded.save(tmp_path / "missing" / "golden.safetensors")


def test_a_thumbnail_is_the_mean_of_each_block():
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3)).astype(np.uint8)
    found = thumbnail(Image.fromarray(pixels))
    expected = pixels.reshape(16, 2, 16, 3, 3).mean(axis=(1, 3))
    np.testing.assert_allclose(found, expected, atol=1e-3)
    # 24 columns: a block takes one and a half, so the first is two thirds of column 0 and a third of column 1.
    ramp = np.broadcast_to(np.arange(24, dtype=np.uint8)[None, :, None], (16, 24, 3))
    np.testing.assert_allclose(thumbnail(Image.fromarray(ramp.copy()))[0, :2, 0], [1 / 3, 5 / 3], atol=1e-6)


def test_nothing_differs_on_the_machine_that_recorded(recorded):
    pictures = golden.decoded_here(recorded)
    assert golden.compare_orientation(recorded, pictures) == "3 images lie as recorded"
    assert golden.compare_resizing(recorded, pictures, PLAIN) == "16x16, to the bit"
    assert golden.compare_normalising(recorded, PLAIN) == "to the bit"
    logits = recorded.logits["model"]
    text = "logits to the bit, the same Top-1 on 3 of 3"
    assert golden.compare_logits(logits, logits.copy(), limit=Limit(spread=0, peak=0)) == text


def decoder(change):
    """Return a decoder that changes the first golden image."""
    first = encoded_pictures()[0]
    return lambda data: change(decode(data)) if data == first else decode(data)


def brighter(image):
    return Image.fromarray(np.asarray(image) + np.uint8(2))


def refuse(image):
    raise ImageError("no reader for it")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (refuse, r"golden image 1 cannot be decoded here: no reader for it\."),
        (brighter, r"golden image 1 has other colours here: block means up to 2\.0 of 255 apart, more than 1\."),
        (
            lambda image: image.crop((0, 0, 39, 24)),
            r"golden image 1 is 39x24 here, and was 40x24 where it was recorded",
        ),
    ],
)
def test_another_decoder_is_told_from_another_orientation(recorded, monkeypatch, change, message):
    monkeypatch.setattr(golden, "decode", decoder(change))
    with pytest.raises(RunError, match=message):
        golden.decoded_here(recorded)


# EXIF's number for how the pixels lie, and what would set them right, from the EXIF standard's own table.
SET_RIGHT = {
    2: "mirrored",
    3: "upside down",
    4: "upside down and mirrored",
    6: "turned right",
    8: "turned left",
}


@pytest.mark.parametrize("orientation", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("size", [(40, 24), (32, 32)])
def test_each_way_to_lie_wrong_is_orientation_and_not_decoding(tmp_path, monkeypatch, orientation, size):
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    inverse = {**TRANSPOSE, 6: TRANSPOSE[8], 8: TRANSPOSE[6]}
    width, height = size
    picture(0, width=width, height=height).transpose(inverse[orientation]).save(stream, "PNG", exif=exif)
    found = record([stream.getvalue()], {}, preprocess=PLAIN, classes=CLASSES)
    assert found.views.upright.tolist() == [[height, width]]
    monkeypatch.setattr(golden, "decode", lambda data: Image.open(io.BytesIO(data)).convert("RGB"))
    pictures = golden.decoded_here(found)
    remedy = SET_RIGHT.get(orientation, r"turned (left|right) and mirrored")
    with pytest.raises(RunError, match=rf"golden image 1 lies another way here: it would have to be {remedy}\. "):
        golden.compare_orientation(found, pictures)


def test_pixels_may_be_two_steps_apart_and_not_three(recorded, monkeypatch):
    pictures = golden.decoded_here(recorded)
    monkeypatch.setattr(golden, "resize_and_crop", lambda image, preprocess: resize_and_crop(image, preprocess) + 2)
    assert golden.compare_resizing(recorded, pictures, PLAIN) == "16x16, up to 2 of 255 apart"
    monkeypatch.setattr(golden, "resize_and_crop", lambda image, preprocess: resize_and_crop(image, preprocess) + 3)
    with pytest.raises(RunError, match=r"resized pixels are up to 3 of 255 apart \(3\.00 on average\), more than 2"):
        golden.compare_resizing(recorded, pictures, PLAIN)


def test_another_geometry_is_resizing(recorded):
    pictures = golden.decoded_here(recorded)
    with pytest.raises(RunError, match=r"with interpolation bilinear and crop_pct 0\.8\. "):
        golden.compare_resizing(recorded, pictures, dataclasses.replace(PLAIN, crop_pct=0.8))
    with pytest.raises(RunError, match=r"run\.json has an input of 8x8, .* were resized to 16x16"):
        golden.compare_resizing(recorded, pictures, dataclasses.replace(PLAIN, input_size=(3, 8, 8)))


def test_the_channel_of_another_mean_is_named(recorded):
    message = r"up to 0\.002 apart, most in green: the mean \[0\.5, 0\.501, 0\.5\] and std \[0\.5, 0\.5, 0\.5\]"
    with pytest.raises(RunError, match=message):
        golden.compare_normalising(recorded, dataclasses.replace(PLAIN, mean=(0.5, 0.501, 0.5)))


def test_logits_are_compared_with_their_spread_over_the_images():
    expected = np.array([[11.0, -4.0], [13.0, 0.0]], np.float32)  # the second class differs by 4
    found = expected + np.array([[0, 0.04], [0, 0]], np.float32)
    text = "logits up to 0.01 of their spread apart, the same Top-1 on 2 of 2"
    assert golden.compare_logits(expected, found, limit=Limit(spread=0.02, peak=0)) == text
    assert golden.compare_logits(expected, found, limit=None) == text
    with pytest.raises(RunError, match=r"up to 0\.01 of their spread apart, .*; more than 0\.001 is not rounding"):
        golden.compare_logits(expected, found, limit=Limit(spread=1e-3, peak=0))
    with pytest.raises(RunError, match=r"logits \(2, 1\), not \(2, 2\) as recorded"):
        golden.compare_logits(expected, found[:, :1], limit=Limit(spread=1, peak=1))
    # One image has no spread: the largest logit, 11, takes its place.
    one = golden.compare_logits(expected[:1] - 7, found[:1] - 7, limit=Limit(spread=0.02, peak=0))
    assert one.startswith("logits up to 0.0036 of their spread apart")


def test_a_bias_much_larger_than_what_images_change_hides_no_error():
    expected = np.array([[100.0, 0.0], [100.1, 0.1]], np.float32)
    swapped = expected[::-1].copy()
    with pytest.raises(RunError, match=r"up to 1 of their spread apart"):
        golden.compare_logits(expected, swapped, limit=Limit(spread=0.05, peak=1e-5))
    # Where values are rounded to more than that, the images prove little, and that is said.
    found = golden.compare_logits(expected, swapped, limit=Limit(spread=0.05, peak=0.015))
    assert found.endswith("; they differ no more from image to image, which proves little")


def test_logits_that_are_not_finite_are_never_rounding():
    expected = np.array([[1.0, -4.0], [2.0, 0.0]], np.float32)
    found = expected.copy()
    found[1, 1] = np.nan
    message = r"logits of 1 of 2 images are not finite, and of 0 in what they are compared with"
    with pytest.raises(RunError, match=message):
        golden.compare_logits(expected, found, limit=Limit(spread=1, peak=1))
    assert golden.compare_logits(found, found, limit=None).startswith(
        "logits of 1 of 2 images are not finite, and of 1"
    )
