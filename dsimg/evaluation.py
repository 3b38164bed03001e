"""The images that a run is measured on, and from logits and labels to a report: the same for torch and ONNX.

numpy only. An image's figures are one row of float64: its id, loss, probability of the best class, and best classes.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsimg import metrics
from dsimg.errors import ConfigError, DataError, RunError
from dsimg.folder import ImageFolder, Split, find_labelled, is_folder, read_index, shown
from dsimg.run import Run, write_atomically, write_json

COLUMNS = ("file", "predicted", "correct")  # of predictions.csv, that other stages read


@dataclass(frozen=True)
class Evaluation:
    """A report (see `metrics.evaluation_report`) and what it was made from, in the split's order."""

    report: dict[str, Any]
    split: Split
    top: NDArray[np.int64]  # (N, min(5, C)) class ids, best first
    probability: NDArray[np.float64]  # (N,) of the best class
    losses: NDArray[np.float64]  # (N,)


def images_of(run: Run) -> ImageFolder:
    """Return the images that a run was trained on, wherever they are now. Raises ConfigError where it does not say."""
    if not run.has("index"):
        raise ConfigError(f"{run.path} does not say what images it was trained on. Give them with --data.")
    return read_index(run.file("index"))


def find_split(run: Run, folder: str | None, classes: Sequence[str]) -> tuple[Split, tuple[str, ...]]:
    """Return the images to measure on, and notes. The folder that the run was trained on gives what training held out.

    Raises ConfigError as `images_of`; DataError as `find_labelled`, or where the images are not there; RunError.
    """
    if folder is not None and not run.has("index"):
        return find_labelled(Path(folder), classes)
    index = images_of(run)
    held_out = "the images that training held out"
    if folder is None:
        if not is_folder(index.val.folder):
            raise DataError(
                f"{index.val.folder}, which the run was trained with, is not there. Give its place now with --data."
            )
        return index.val, (held_out,)
    root = Path(folder)
    if is_folder(root) and root.resolve() == index.root.resolve():
        return index.val, (held_out,)
    if index.val.folder != index.train.folder:
        return find_labelled(root, classes)
    recorded = recorded_split(index.val, index.root, root)
    if recorded is not None:
        return recorded, (held_out, *missing_notes(index.val, recorded))
    split, notes = find_labelled(root, classes)
    trained_on = set(index.train.files)
    if any(file in trained_on for file in split.files):
        notes = (*notes, "most of what training held out is not there: images of training may be among these")
    return split, notes


def recorded_split(split: Split, old: Path, root: Path) -> Split | None:
    """Return the images of a split, listed when the data lay in `old`, that are in `root` now; None where fewer than
    half of them are. `root` may also be the split's own folder. Raises DataError: a folder that may not be read."""
    for folder in (root / split.folder.relative_to(old), root):
        try:
            there = [place for place, file in enumerate(split.files) if (folder / file).is_file()]
        except OSError as error:
            raise DataError(f"cannot read {shown(folder)}: {error.strerror}. Change its permissions.") from None
        if 2 * len(there) >= max(len(split.files), 1):
            return Split(folder, tuple(split.files[place] for place in there), split.labels[there])
    return None


def missing_notes(recorded: Split, found: Split) -> tuple[str, ...]:
    """Return a note of how many images of a recorded split `recorded_split` did not find, or nothing."""
    missing = len(recorded.files) - len(found.files)
    return (f"{missing:,} of its {len(recorded.files):,} images are missing",) if missing else ()


def measure(
    logits: NDArray[np.floating[Any]], labels: NDArray[np.integer[Any]], ids: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Return the rows (N, 3 + min(5, C)) of images `ids` (N,) from logits (N, C) and labels (N,).

    The loss is cross-entropy; a row whose logits are not finite has a loss and a probability that are not either.
    """
    exact = logits.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = exact - exact.max(axis=1, keepdims=True)
        log_total = np.log(np.exp(shifted).sum(axis=1))
    losses = log_total - shifted[np.arange(len(labels)), labels]
    return np.column_stack([ids, losses, np.exp(-log_total), metrics.top_k(exact, metrics.TOP)])


def gather(
    rows: Sequence[NDArray[np.float64]], unreadable: Mapping[str, str], *, split: Split, classes: Sequence[str]
) -> Evaluation:
    """Return the evaluation of a split from the rows of its images, in any order, and the files that had none, with
    the reason. Raises DataError when not one image could be read."""
    table = np.concatenate(rows) if rows else np.empty((0, 3 + min(metrics.TOP, len(classes))))
    table = table[np.argsort(table[:, 0], kind="stable")]
    ids = table[:, 0].astype(np.int64)
    if len(ids) + len(unreadable) != len(split.files) or len(np.unique(ids)) != len(ids):
        raise AssertionError(f"evaluated {len(ids)} + {len(unreadable)} unreadable of {len(split.files)} images")
    if not len(ids):
        raise DataError(
            f"none of the {len(split.files)} images in {split.folder} can be decoded: there is nothing to evaluate."
        )
    top = table[:, 3:].astype(np.int64)
    report = metrics.evaluation_report(labels=split.labels[ids], top=top, losses=table[:, 1], classes=classes)
    report["bad_images"] = [{"file": file, "reason": reason} for file, reason in sorted(unreadable.items())]
    good = Split(split.folder, tuple(split.files[i] for i in ids), split.labels[ids])
    return Evaluation(report, good, top, table[:, 2], table[:, 1])


def write_evaluation(folder: Path, evaluation: Evaluation, classes: Sequence[str]) -> None:
    """Write `evaluation.json` and `predictions.csv` (a line per image) into a folder."""
    write_json(folder / "evaluation.json", evaluation.report)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    width = evaluation.top.shape[1]
    writer.writerow(
        [
            "file",
            "label",
            "predicted",
            "correct",
            "probability",
            "loss",
            *(f"top{k + 1}" for k in range(width)),
        ]
    )
    for file, label, top, probability, loss in zip(
        evaluation.split.files,
        evaluation.split.labels,
        evaluation.top,
        evaluation.probability,
        evaluation.losses,
        strict=True,
    ):
        names = ["" if k == metrics.NO_CLASS else classes[k] for k in top]
        writer.writerow(
            [
                file,
                classes[label],
                names[0],
                int(top[0] == label),
                f"{probability:.6f}",
                f"{loss:.6f}",
                *names,
            ]
        )
    write_atomically(folder / "predictions.csv", text.getvalue().encode("utf-8", "surrogateescape"))


def read_predictions(path: Path) -> dict[str, dict[str, str]]:
    """Return the rows of a `predictions.csv` by their files, each with COLUMNS. Raises RunError."""
    try:
        with path.open(encoding="utf-8", errors="surrogateescape", newline="") as stream:
            rows = csv.DictReader(stream)
            for name in COLUMNS:
                if name not in (rows.fieldnames or ()):
                    raise ValueError(f"it has no column '{name}'")
            return {row["file"]: row for row in rows}
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(f"cannot read {path}: {error}. Remove it, or evaluate the run again.") from error


def result_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the result table: accuracy with its 95 % interval, loss, images."""

    rows = [("images", f"{report['images']}, {report['correct']} right")]
    rows.append(("Top-1", metrics.accuracy_text(report["top1"])))
    if report["top5"] is not None:
        rows.append(("Top-5", metrics.accuracy_text(report["top5"])))
    rows.append(("loss", "not finite" if report["loss"] is None else f"{report['loss']:.4f}"))
    if report["not_finite"]:
        rows.append(("no prediction", f"{report['not_finite']} images gave NaN or infinity; counted as wrong"))
    if report["bad_images"]:
        names = ", ".join(entry["file"] for entry in report["bad_images"][:3])
        rows.append(("unreadable", f"{len(report['bad_images'])} images left out: {names}"))
    return rows
