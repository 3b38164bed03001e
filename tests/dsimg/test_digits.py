import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dsimg.digits import write_digits
from dsimg.errors import DataError
from dsimg.folder import find_images, find_leaks


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "sub" / "digits")


def test_class_folders_hold_every_digit_once_a_fifth_of_each_for_validation(digits: Path) -> None:
    folder = find_images(digits, seed=0)
    assert folder.notes == ()
    assert folder.classes == tuple("0123456789")
    assert (len(folder.train.files), len(folder.val.files)) == (1438, 359)
    # scikit-learn's counts: 178, 182, 177, 183, 181, 182, 181, 179, 174, 180
    assert np.bincount(folder.val.labels).tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    names = [Path(name).name for name in (*folder.train.files, *folder.val.files)]
    assert sorted(names) == [f"{index:04d}.png" for index in range(1797)]
    assert find_leaks(folder) == []


def test_pictures_are_the_digits_enlarged(digits: Path) -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    folder = find_images(digits, seed=0)
    for name, label in zip(folder.val.files[::10], folder.val.labels[::10], strict=True):
        with Image.open(folder.val.folder / name) as picture:
            assert (picture.mode, picture.size) == ("L", (32, 32))
            small = np.asarray(picture.resize((8, 8), Image.Resampling.BOX)) * (16 / 255)
        index = int(Path(name).stem)
        assert data.target[index] == label
        assert np.square(data.images - small).sum((1, 2)).argmin() == index  # nearer to its own than to any other


def test_the_same_files_every_time_and_a_complete_folder_is_left_alone(digits: Path, tmp_path: Path) -> None:
    def fingerprint(root: Path) -> list[tuple[str, str]]:
        paths = sorted(root.rglob("*.png"))
        return [(str(path.relative_to(root)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]

    again = write_digits(tmp_path / "digits")
    assert again == tmp_path / "digits"
    assert fingerprint(again) == fingerprint(digits)
    before = [(path, path.stat().st_mtime_ns) for path in again.rglob("*")]
    assert write_digits(again) == again
    assert [(path, path.stat().st_mtime_ns) for path in again.rglob("*")] == before
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_processes_that_write_at_once_end_with_one_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        roots = list(pool.map(lambda _: write_digits(tmp_path / "digits"), range(3)))
    assert roots == [tmp_path / "digits"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]
    assert len(list(tmp_path.glob("digits/*/*/*.png"))) == 1797


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "digits"
    (root / "train/0").mkdir(parents=True)
    (root / "train/0/mine.png").touch()
    with pytest.raises(DataError) as caught:
        write_digits(root)
    assert str(caught.value) == f"{root} is not the complete set of digits; remove it, and it is written again."
    assert [path.name for path in root.rglob("*.png")] == ["mine.png"]


def test_without_scikit_learn_the_error_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError) as caught:
        write_digits(tmp_path / "data/digits")
    assert str(caught.value) == "the digits come with scikit-learn; run pip install 'dsimg[train]'."
    assert list(tmp_path.iterdir()) == []
