"""Which images a run is quantized with: those that set the ranges, those that choose, and those that are reported."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsimg.errors import DataError, RunError
from dsimg.evaluation import images_of, missing_notes, recorded_split
from dsimg.folder import ImageFolder, Split, find_images, find_labelled, is_folder
from dsimg.run import Run, read_json

CHOOSING_IMAGES = 1000  # at most; their pixels are kept in memory


@dataclass(frozen=True)
class Samples:
    """Three sets of images, of which none is in two."""

    calibration: Split  # training images
    choosing: Split  # other training images, for what is tried; empty where there are no others
    validation: Split
    notes: tuple[str, ...]


def find_samples(run: Run, data: str | None, *, calibration_images: int, seed: int) -> Samples:
    """Draw the images for a run, by class and `seed`, from `data` or from the images that the run was trained with.

    At most half of the training images calibrate. Class folders without train/ are split in a quarter to calibrate on,
    a quarter to choose by, and the rest to report on.
    Raises ConfigError: neither data nor an index; DataError: images that are not there, or of other classes.
    """
    folder = _folder(run, data, seed)
    train, validation = folder.train, folder.val
    order = stratified(train.labels, seed)
    if len(validation.files):
        count = min(calibration_images, -(-len(order) // 2))
        others = order[count : count + CHOOSING_IMAGES]
    else:
        count = min(calibration_images, -(-len(order) // 4))
        others = order[count : count + min(CHOOSING_IMAGES, len(order) // 4)]
        validation = subset(train, np.sort(order[count + len(others) :]))
    if not len(validation.files):
        raise DataError(f"{folder.root} has a single image to quantize and measure with. Give a folder with more.")
    return Samples(
        calibration=subset(train, np.sort(order[:count])),
        choosing=subset(train, np.sort(others)),
        validation=validation,
        notes=folder.notes,
    )


def stratified(labels: NDArray[np.integer], seed: int) -> NDArray[np.int64]:
    """Return an order of the images, labels: (N,), of which any beginning has each class as often as any other, give or
    take one, for as long as there are images of it."""
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = np.argsort(labels[shuffled], kind="stable")
    counts = np.unique(labels, return_counts=True)[1]
    turn = np.empty(len(labels), np.int64)  # how many of its class stand before an image
    turn[by_class] = np.concatenate([np.arange(count) for count in counts]) if len(counts) else 0
    return shuffled[np.argsort(turn, kind="stable")]


def subset(split: Split, places: Sequence[int] | NDArray[np.int64]) -> Split:
    """Return the images at `places` of a split."""
    return Split(split.folder, tuple(split.files[place] for place in places), split.labels[np.asarray(places, int)])


def _folder(run: Run, data: str | None, seed: int) -> ImageFolder:
    """Return the images of `data`, or the run's, with the labels of the run's classes; all as training images where
    nothing says which are for validation."""
    if data is None:
        known = images_of(run)
        missing = [split.folder for split in (known.train, known.val) if not is_folder(split.folder)]
        if missing:
            raise DataError(f"{missing[0]}, which the run was trained with, is not there. Give its place with --data.")
        return known
    index = images_of(run) if run.has("index") else None
    root = Path(data)
    if index is not None and is_folder(root) and root.resolve() == index.root.resolve():
        return index
    if index is not None and index.train.folder == index.val.folder:
        # A share of each class was drawn for validation: the same one, where the folder has only moved.
        here, held_out = (recorded_split(split, index.root, root) for split in (index.train, index.val))
        if here is not None and held_out is not None:
            gone = [f"to train on, {note}" for note in missing_notes(index.train, here)]
            gone += [f"held out, {note}" for note in missing_notes(index.val, held_out)]
            return ImageFolder(root, index.classes, here, held_out, (*index.notes, *gone))
    classes = list(run.model["classes"])
    if not is_folder(root / "train"):
        pool, notes = find_labelled(root, classes)
        return ImageFolder(root, tuple(classes), pool, subset(pool, []), (*notes, *_seen(pool, index)))
    drawn_by = _training_seed(run)
    folder = find_images(root, seed=seed if drawn_by is None else drawn_by)
    unknown = sorted(set(folder.classes) - set(classes))
    if unknown:
        raise DataError(f"{root} has the class '{unknown[0]}', which {run.path} does not know. Give its own images.")
    label = np.array([classes.index(name) for name in folder.classes])
    train, val = (Split(split.folder, split.files, label[split.labels]) for split in (folder.train, folder.val))
    notes = _seen(val, index) if val.folder == train.folder else ()
    return ImageFolder(root, tuple(classes), train, val, (*folder.notes, *notes))


def _training_seed(run: Run) -> int | None:
    """Return the seed by which the run's nearest ancestor with one drew its validation images; None where no such run
    is there."""
    manifest = run.manifest or {}
    while manifest.get("seed") is None:
        parents = manifest.get("parents") or [{"path": ""}]
        path = Path(parents[0]["path"]) / "run.json"
        try:
            manifest = read_json(path)
        except RunError:
            return None
    return int(manifest["seed"])


def _seen(drawn: Split, index: ImageFolder | None) -> tuple[str, ...]:
    """Return the note on images that are reported on and that nothing kept out of training."""
    if index is not None and set(index.train.files).isdisjoint(drawn.files):
        return ()
    return ("what training held out is not known here: images of training may be among those reported on",)
