"""Which pictures an exported file is compared on, and what is said of them."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dsimg.errors import DataError, RunError
from dsimg.folder import find_images, write_index
from dsimg.pictures import COUNT, find_pictures
from dsimg.preprocess import Preprocess, decode, resize_and_crop
from dsimg.run import Run
from tests.conftest import make_folder

CLASSES = ("ant", "bee")
PREPROCESS = Preprocess(input_size=(3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear", crop_pct=1.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    make_folder(tmp_path / "data", classes=CLASSES, train=2, val=3)
    begun, _ = Run.begin(tmp_path / "run", stage="train", config={})
    write_index(find_images(tmp_path / "data", seed=0), begun.path / "index.jsonl.gz")
    begun.finish(seed=0, model={}, metrics={})
    return Run.open(begun.path)


def spoil(folder: Path) -> None:
    for file in folder.rglob("*.png"):
        file.write_bytes(b"no image")


def find(run: Run | None, data: Path | None = None) -> tuple[list[bytes], str]:
    return find_pictures(run, None if data is None else str(data), classes=CLASSES, preprocess=PREPROCESS)


def test_the_runs_images_and_the_first_of_them_turned(run: Run, tmp_path: Path) -> None:
    found, where = find(run)
    files = sorted((tmp_path / "data" / "val").rglob("*.png"))
    assert found[:-1] == [file.read_bytes() for file in files]
    assert where == f"6 of {tmp_path / 'data' / 'val'}, and one turned"
    upright, turned = (resize_and_crop(decode(data), PREPROCESS).astype(float) for data in (found[0], found[-1]))
    assert np.abs(upright - turned).mean() < np.abs(upright - np.rot90(turned)).mean()


def test_given_images_of_which_none_can_be_decoded_are_an_error(run: Run, tmp_path: Path) -> None:
    make_folder(tmp_path / "given", classes=CLASSES)
    spoil(tmp_path / "given" / "val")
    with pytest.raises(DataError, match=r"none of the 8 images in .*val can be decoded \(ant/.*not an image"):
        find(run, tmp_path / "given")


def test_made_up_pictures_say_why_there_are_no_others(run: Run, tmp_path: Path) -> None:
    found, where = find(None)
    assert len({*found}) == COUNT
    assert where == "32 made-up pictures: no --data"
    spoil(tmp_path / "data" / "val")
    assert "no --data, and none of the 6 images in" in find(run)[1]
    shutil.rmtree(tmp_path / "data")
    assert find(run)[1] == f"32 made-up pictures: no --data, and {tmp_path / 'data' / 'val'} is not there"


def test_a_damaged_index_is_an_error(run: Run) -> None:
    (run.path / "index.jsonl.gz").write_bytes(b"damaged")
    with pytest.raises(RunError, match="is damaged"):
        find(run)


def test_an_image_that_cannot_be_decoded_is_passed_over(run: Run, tmp_path: Path) -> None:
    bad = next((tmp_path / "data" / "val" / "ant").iterdir())
    bad.write_bytes(b"")
    assert find(run)[1].startswith("5 of ")
