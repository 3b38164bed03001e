"""Which images a run is quantized with."""

import shutil
from collections import Counter

import numpy as np
import pytest

from dsimg.errors import ConfigError, DataError
from dsimg.folder import find_images, write_index
from dsimg.run import Run
from dsimg_export.samples import find_samples, stratified
from tests.conftest import make_folder, without_rights
from tests.export.files import write_network
from tests.export.runs import CLASSES, MODEL, write_run


def write_indexed(path, folder):
    """Write an exported run that knows its images."""
    run, _ = Run.begin(path, stage="export", config={})
    write_network(path / "model.onnx")
    write_index(find_images(folder, seed=0), path / "index.jsonl.gz")
    run.finish(seed=0, model=MODEL, metrics={})
    return Run.open(path)


def names(split):
    return {str(split.folder / file) for file in split.files}


def test_any_beginning_of_the_order_has_each_class_as_often_as_any_other():
    labels = np.array([0] * 50 + [1] * 5 + [2] * 20)
    order = stratified(labels, 7)
    assert sorted(order) == list(range(75))
    for length in range(1, 16):
        counts = np.bincount(labels[order[:length]], minlength=3)
        assert counts.max() - counts.min() <= 1
    assert Counter(labels[order[:35]]) == {0: 15, 1: 5, 2: 15}
    assert not np.array_equal(order, stratified(labels, 8))


def test_no_image_is_in_two_sets_and_training_images_calibrate(tmp_path):
    folder = make_folder(tmp_path / "data", classes=tuple(CLASSES), train=8, val=4)
    run = write_run(tmp_path / "run")
    found = find_samples(run, str(folder), calibration_images=10, seed=0)
    assert np.bincount(found.calibration.labels).tolist() == [2] * 5
    assert (len(found.choosing.files), len(found.validation.files)) == (30, 20)
    assert {found.calibration.folder.name, found.choosing.folder.name, found.validation.folder.name} == {"train", "val"}
    assert not names(found.calibration) & names(found.choosing)
    for split in (found.calibration, found.choosing, found.validation):
        for file, label in zip(split.files, split.labels, strict=True):
            assert file.startswith(f"{CLASSES[label]}/")
    assert find_samples(run, str(folder), calibration_images=10, seed=0).calibration.files == found.calibration.files
    assert find_samples(run, str(folder), calibration_images=10, seed=1).calibration.files != found.calibration.files


def test_at_most_half_of_the_training_images_calibrate(tmp_path):
    folder = make_folder(tmp_path / "data", classes=tuple(CLASSES), train=3, val=1)
    found = find_samples(write_run(tmp_path / "run"), str(folder), calibration_images=512, seed=0)
    assert (len(found.calibration.files), len(found.choosing.files), len(found.validation.files)) == (8, 7, 5)


def test_class_folders_alone_are_split_in_a_quarter_a_quarter_and_the_rest(tmp_path):
    make_folder(tmp_path / "data", classes=tuple(CLASSES), train=1, val=0)
    found = find_samples(write_run(tmp_path / "run"), str(tmp_path / "data/train"), calibration_images=9, seed=0)
    assert (len(found.calibration.files), len(found.choosing.files), len(found.validation.files)) == (2, 1, 2)
    sets = [names(split) for split in (found.calibration, found.choosing, found.validation)]
    assert len(set.union(*sets)) == 5


def test_labels_are_those_of_the_run_where_the_folder_lacks_classes(tmp_path):
    folder = make_folder(tmp_path / "data", classes=("fly", "wasp"), train=4, val=2)
    found = find_samples(write_run(tmp_path / "run"), str(folder), calibration_images=4, seed=0)
    assert sorted(set(found.validation.labels.tolist())) == [CLASSES.index("fly"), CLASSES.index("wasp")]
    make_folder(tmp_path / "other", classes=("fly", "spider"))
    with pytest.raises(DataError, match=r"other has the class 'spider', which .*again does not know"):
        find_samples(write_run(tmp_path / "again"), str(tmp_path / "other"), calibration_images=4, seed=0)


def test_the_images_that_training_held_out_stay_held_out_where_the_folder_moved(tmp_path):
    make_folder(tmp_path / "made", classes=tuple(CLASSES), train=10, val=0)
    folder = (tmp_path / "made" / "train").rename(tmp_path / "pictures")
    run = write_indexed(tmp_path / "run", folder)
    held_out = set(find_images(folder, seed=0).val.files)
    for data in (None, str(folder)):
        assert set(find_samples(run, data, calibration_images=5, seed=3).validation.files) == held_out
    shutil.move(folder, tmp_path / "moved")
    found = find_samples(run, str(tmp_path / "moved"), calibration_images=5, seed=3)
    assert set(found.validation.files) == held_out
    assert found.calibration.folder == tmp_path / "moved"
    with pytest.raises(DataError, match=r"pictures, which the run was trained with, is not there\. Give its place"):
        find_samples(run, None, calibration_images=5, seed=3)


def test_held_out_images_stay_held_out_where_some_files_are_gone_from_the_moved_folder(tmp_path):
    make_folder(tmp_path / "made", classes=tuple(CLASSES), train=10, val=0)
    folder = (tmp_path / "made" / "train").rename(tmp_path / "pictures")
    run = write_indexed(tmp_path / "run", folder)
    images = find_images(folder, seed=0)
    moved = folder.rename(tmp_path / "moved")
    (moved / images.val.files[3]).unlink()
    (moved / images.train.files[7]).unlink()
    found = find_samples(run, str(moved), calibration_images=5, seed=3)
    assert found.validation.files == images.val.files[:3] + images.val.files[4:]
    assert {*found.calibration.files, *found.choosing.files} == {*images.train.files} - {images.train.files[7]}
    for split in (found.calibration, found.choosing, found.validation):
        assert [CLASSES[label] for label in split.labels] == [file.split("/")[0] for file in split.files]
    assert "to train on, 1 of its 40 images are missing" in found.notes
    assert "held out, 1 of its 10 images are missing" in found.notes


def write_trained(path, *, seed):
    """Write a run of a training, of which nothing but its seed is of interest."""
    run, _ = Run.begin(path, stage="train", config={})
    run.finish(seed=seed, model=MODEL, metrics={})
    return Run.open(path)


def test_a_validation_share_that_must_be_drawn_again_is_drawn_by_the_seed_of_training(tmp_path):
    folder = make_folder(tmp_path / "data", classes=tuple(CLASSES), train=10, val=0)
    trained = write_trained(tmp_path / "trained", seed=4)
    run, _ = Run.begin(tmp_path / "run", stage="export", config={}, parents=[trained])
    run.finish(seed=None, model=MODEL, metrics={})
    found = find_samples(Run.open(run.path), str(folder), calibration_images=5, seed=3)
    assert found.validation.files == find_images(folder, seed=4).val.files
    assert found.validation.files != find_images(folder, seed=3).val.files
    shutil.rmtree(trained.path)
    found = find_samples(Run.open(run.path), str(folder), calibration_images=5, seed=3)
    assert found.validation.files == find_images(folder, seed=3).val.files


def test_images_of_training_among_those_reported_on_are_noted(tmp_path):
    def warned(run, data):
        notes = find_samples(run, str(data), calibration_images=5, seed=0).notes
        return any("images of training may be among those reported on" in note for note in notes)

    folder = make_folder(tmp_path / "data", classes=tuple(CLASSES), train=10, val=4)
    unindexed, indexed = write_run(tmp_path / "unindexed"), write_indexed(tmp_path / "indexed", folder)
    assert not warned(unindexed, folder)
    assert warned(unindexed, folder / "train")
    assert warned(indexed, folder / "train")
    others = tmp_path / "others"
    for name in CLASSES:
        (others / name).mkdir(parents=True)
        for number in range(4):
            shutil.copy(next((folder / "val" / name).iterdir()), others / name / f"other_{number}.png")
    assert not warned(indexed, others)
    assert warned(unindexed, others)


def test_a_folder_that_may_not_be_read_is_named(open_folder):
    data = make_folder(open_folder / "data", classes=tuple(CLASSES), train=2, val=1)
    run = write_indexed(open_folder / "run", data)
    data.chmod(0)
    with without_rights(), pytest.raises(DataError, match=r"cannot read .*data.*: Permission denied"):
        find_samples(run, None, calibration_images=5, seed=3)


def test_a_run_that_knows_no_images_asks_for_them(tmp_path):
    with pytest.raises(ConfigError, match=r"run does not say what images it was trained on\. Give them with --data\."):
        find_samples(write_run(tmp_path / "run"), None, calibration_images=5, seed=0)
