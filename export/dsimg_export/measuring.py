"""Accuracy of an ONNX session on labelled images: the figures and the report of `dsimg evaluate`, without torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsimg.evaluation import Evaluation, gather, measure
from dsimg.folder import Split
from dsimg.preprocess import Preprocess
from dsimg.runtime import Provider
from dsimg_export.reading import read_batches

Answer = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


def evaluate_session(
    logits: Answer,
    *,
    split: Split,
    preprocess: Preprocess,
    classes: Sequence[str],
    batch_size: int = 32,
    threads: int | None = None,
) -> Evaluation:
    """Measure what gives logits (N, C) for pixels (N, H, W, 3) on a split, each image once.

    threads: that decode; None is one a core. Files that cannot be decoded are counted and left out of the figures.
    Raises DataError when none can be.
    """
    found = evaluate_sessions(
        {"": logits}, split=split, preprocess=preprocess, classes=classes, batch_size=batch_size, threads=threads
    )
    return found[""]


def measured_on(evaluation: Evaluation, *, file: Path, role: str, provider: Provider) -> Evaluation:
    """Return an evaluation whose report says which file of a run was measured, and where."""
    said = {"file": file.name, "role": role, "provider": provider}
    return replace(evaluation, report={**evaluation.report, "measured": said})


def evaluate_sessions(
    answers: Mapping[str, Answer],
    *,
    split: Split,
    preprocess: Preprocess,
    classes: Sequence[str],
    batch_size: int = 32,
    threads: int | None = None,
) -> dict[str, Evaluation]:
    """Measure several networks as `evaluate_session` does one, by name; each image is decoded once for all of them."""
    files = [split.folder / file for file in split.files]
    rows: dict[str, list[NDArray[np.float64]]] = {name: [] for name in answers}
    unreadable: dict[str, str] = {}
    for ids, pixels, bad in read_batches(files, preprocess, batch_size=batch_size, threads=threads):
        if len(ids):
            for name, logits in answers.items():
                rows[name].append(measure(logits(pixels), split.labels[ids], ids))
        unreadable.update({split.files[place]: reason for place, reason in bad.items()})
    return {name: gather(rows[name], unreadable, split=split, classes=classes) for name in answers}
