"""Which images a run is measured on, where its data set lies elsewhere now, or not whole."""

import shutil
from pathlib import Path

import pytest

from dsimg.errors import ConfigError, DataError, RunError
from dsimg.evaluation import find_split, read_predictions
from dsimg.folder import find_images, is_folder, read_index, write_index
from dsimg.run import Run
from tests.conftest import make_folder, without_rights

CLASSES = ("ant", "bee")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run on class folders in tmp_path/data/train, of whose twenty images each, four were held out."""
    make_folder(tmp_path / "data", classes=CLASSES, train=20, val=1)
    shutil.rmtree(tmp_path / "data" / "val")
    begun, _ = Run.begin(tmp_path / "run", stage="train", config={})
    write_index(find_images(tmp_path / "data", seed=0), begun.path / "index.jsonl.gz")
    begun.finish(seed=0, model={}, metrics={})
    return Run.open(begun.path)


def held_out(run: Run) -> tuple[str, ...]:
    return read_index(run.file("index")).val.files


def test_moved_data_that_lack_a_held_out_image_give_the_others_and_say_how_many_are_missing(
    run: Run, tmp_path: Path
) -> None:
    moved = (tmp_path / "data").rename(tmp_path / "moved")
    first, *others = held_out(run)
    (moved / "train" / first).unlink()
    split, notes = find_split(run, str(moved), CLASSES)
    assert (split.folder, split.files) == (moved / "train", tuple(others))
    assert [file.split("/")[0] for file in split.files] == [CLASSES[label] for label in split.labels]
    assert notes == ("the images that training held out", "1 of its 8 images are missing")


def test_moved_data_without_the_held_out_images_may_be_those_of_training_and_that_is_said(
    run: Run, tmp_path: Path
) -> None:
    for file in held_out(run)[:5]:
        (tmp_path / "data" / "train" / file).unlink()
    moved = (tmp_path / "data" / "train").rename(tmp_path / "moved")
    split, notes = find_split(run, str(moved), CLASSES)
    assert len(split.files) == 35
    assert "images of training may be among these" in notes[-1]


def test_other_images_are_measured_without_such_a_note(run: Run, tmp_path: Path) -> None:
    for name in CLASSES:
        (tmp_path / "other" / name).mkdir(parents=True)
        image = next((tmp_path / "data" / "train" / name).iterdir())
        shutil.copy(image, tmp_path / "other" / name / "unheard_of.png")
    split, notes = find_split(run, str(tmp_path / "other"), CLASSES)
    assert (split.files, notes) == (("ant/unheard_of.png", "bee/unheard_of.png"), ())


def test_the_class_folders_themselves_give_what_was_held_out_of_them(run: Run, tmp_path: Path) -> None:
    split, notes = find_split(run, str(tmp_path / "data" / "train"), CLASSES)
    assert split.files == held_out(run)
    assert notes == ("the images that training held out",)


def test_a_folder_that_may_not_be_read_is_an_error_of_the_data(open_folder: Path) -> None:
    inner = open_folder / "outer" / "inner"
    inner.mkdir(parents=True)
    assert is_folder(inner)
    inner.parent.chmod(0)
    with without_rights():
        with pytest.raises(DataError, match=r"cannot read .*inner: Permission denied\. Change the permissions"):
            is_folder(inner)
        assert not is_folder(open_folder / "gone")
        assert not is_folder(Path(__file__) / "below a file")


def test_a_run_that_does_not_say_what_it_was_trained_on_asks_for_images(tmp_path: Path) -> None:
    begun, _ = Run.begin(tmp_path / "bare", stage="train", config={})
    begun.finish(seed=0, model={}, metrics={})
    message = r"bare does not say what images it was trained on\. Give them with --data\."
    with pytest.raises(ConfigError, match=message):
        find_split(Run.open(begun.path), None, CLASSES)
    make_folder(tmp_path / "data", classes=CLASSES, train=1, val=1)
    assert len(find_split(Run.open(begun.path), str(tmp_path / "data"), CLASSES)[0].files) == 2


@pytest.mark.parametrize("head", ["", "file,label", "file,predicted", "predicted,correct"])
def test_predictions_without_what_is_read_of_them_are_damaged(tmp_path: Path, head: str) -> None:
    path = tmp_path / "predictions.csv"
    path.write_text("file,predicted,correct\nant/1.png,ant,1\n")
    assert read_predictions(path) == {"ant/1.png": {"file": "ant/1.png", "predicted": "ant", "correct": "1"}}
    path.write_text(f"{head}\nant/1.png,ant\n")
    with pytest.raises(RunError, match=r"cannot read .*\.csv: it has no column '\w+'\. Remove it, or evaluate the run"):
        read_predictions(path)
