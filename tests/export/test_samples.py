"""Which images a run is quantized with."""

import shutil
from collections import Counter

import numpy as np
import pytest

from dsimg.errors import ConfigError, DataError
from dsimg.folder import find_images, write_index
from dsimg.run import Run
from dsimg_export.samples import find_samples, stratified
from tests.conftest import make_folder
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


def test_a_run_that_knows_no_images_asks_for_them(tmp_path):
    with pytest.raises(ConfigError, match=r"run does not know the images it was trained with\. Give them with --data"):
        find_samples(write_run(tmp_path / "run"), None, calibration_images=5, seed=0)
