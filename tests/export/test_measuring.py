import numpy as np
import pytest

from dsimg.errors import DataError
from dsimg.folder import Split
from dsimg.preprocess import Preprocess
from dsimg_export.measuring import evaluate_session, evaluate_sessions
from tests.export.test_reading import write_files

PLAIN = Preprocess(input_size=(3, 4, 4), mean=(0, 0, 0), std=(1, 1, 1), crop_pct=1.0)
CLASSES = ("even", "odd", "neither")


def parity_of(pixels):
    """Return logits that say of a picture whether its grey is even or odd, with the softmax 0.8, 0.1, 0.1."""
    return np.eye(3, dtype=np.float32)[pixels[:, 0, 0, 0] % 2] * np.float32(np.log(8))


def split_of(folder, labels, *, bad=()):
    files = write_files(folder, len(labels), bad=bad)
    return Split(folder, tuple(file.name for file in files), np.array(labels))


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_each_image_counts_once(tmp_path, batch_size):
    labels = [0, 1, 0, 1, 0, 1, 1, 2, 0, 1]  # the sixth and seventh are wrong
    batches = []

    def logits(pixels):
        batches.append(len(pixels))
        return parity_of(pixels)

    found = evaluate_session(
        logits, split=split_of(tmp_path, labels), preprocess=PLAIN, classes=CLASSES, batch_size=batch_size, threads=2
    )
    assert sum(batches) == 10
    assert max(batches) == min(batch_size, 10)
    report = found.report
    assert (report["images"], report["correct"], report["top1"]["value"]) == (10, 8, 0.8)
    assert report["loss"] == pytest.approx(-(8 * np.log(0.8) + 2 * np.log(0.1)) / 10)
    assert found.top[:, 0].tolist() == [0, 1] * 5
    assert found.probability == pytest.approx([0.8] * 10)
    assert found.split.files == tuple(f"{number:03}.png" for number in range(10))


def test_unreadable_files_are_named_and_not_counted(tmp_path):
    split = split_of(tmp_path, [0, 1, 0, 0], bad={1, 2})
    found = evaluate_session(parity_of, split=split, preprocess=PLAIN, classes=CLASSES)
    assert (found.report["images"], found.report["correct"]) == (2, 1)
    assert [entry["file"] for entry in found.report["bad_images"]] == ["001.png", "002.png"]
    assert found.split.files == ("000.png", "003.png")


def test_no_readable_file_is_an_error(tmp_path):
    split = split_of(tmp_path, [0, 1], bad={0, 1})
    with pytest.raises(DataError, match=r"none of the 2 images in .* can be decoded"):
        evaluate_session(parity_of, split=split, preprocess=PLAIN, classes=CLASSES)


def test_several_networks_are_measured_on_one_reading(tmp_path):
    split = split_of(tmp_path, [0, 1, 1])
    given = []

    def wrong(pixels):
        given.append(pixels.copy())
        return -parity_of(pixels)

    found = evaluate_sessions(
        {"right": parity_of, "wrong": wrong}, split=split, preprocess=PLAIN, classes=CLASSES, batch_size=2, threads=1
    )
    assert {name: one.report["correct"] for name, one in found.items()} == {"right": 2, "wrong": 1}
    assert np.concatenate(given)[:, 0, 0, 0].tolist() == [0, 1, 2]
