"""`loop.evaluate` on its own, with a network whose answers are known. `fit` is tested through the train stage."""

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsimg import data, loop
from dsimg.errors import DataError
from dsimg.evaluation import Evaluation, result_rows, write_evaluation
from dsimg.folder import Split, find_images
from dsimg.preprocess import Preprocess
from dsimg.world import start_world

PREPROCESS = Preprocess(input_size=(3, 32, 32), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), crop_pct=1.0)
CLASSES = ("ant", "bee")


def bright_is_bee(images: Tensor) -> Tensor:
    """(N, 3, 32, 32) in 0..1 -> logits (N, 2): the test's images tell their class by their brightness."""
    brightness = images.mean((1, 2, 3))
    return torch.stack([0.4 - brightness, brightness - 0.4], 1) * 100


def measure(split: Split, forward: object = bright_is_bee) -> Evaluation:
    batches = data.EvalLoader(split, PREPROCESS, batch_size=3)
    result = loop.evaluate(
        forward,  # type: ignore[arg-type]
        world=start_world(),
        batches=batches,
        split=split,
        preprocess=PREPROCESS,
        classes=CLASSES,
    )
    assert result is not None
    return result


def test_each_image_counts_once_and_an_unreadable_one_is_said(small_folder: Path, tmp_path: Path) -> None:
    (small_folder / "val" / "bee" / "empty.png").write_bytes(b"")
    result = measure(find_images(small_folder, seed=0).val)
    assert (result.report["images"], result.report["correct"]) == (8, 8)
    assert [entry["file"] for entry in result.report["bad_images"]] == ["bee/empty.png"]
    assert ("unreadable", "1 images left out: bee/empty.png") in result_rows(result.report)
    write_evaluation(tmp_path, result, CLASSES)
    with (tmp_path / "predictions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["label"] for row in rows] == ["ant"] * 4 + ["bee"] * 4
    assert all(row["predicted"] == row["label"] == row["top1"] for row in rows)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == result.report


def test_a_network_that_gives_nan_predicts_nothing(small_folder: Path) -> None:
    def nan_for_dark(images: Tensor) -> Tensor:
        logits = bright_is_bee(images)
        return torch.where(logits[:, :1] > 0, torch.nan, logits)

    result = measure(find_images(small_folder, seed=0).val, nan_for_dark)
    assert (result.report["correct"], result.report["not_finite"]) == (4, 4)
    assert ("no prediction", "4 images gave NaN or infinity; counted as wrong") in result_rows(result.report)


def test_nothing_that_decodes_is_an_error(small_folder: Path) -> None:
    for path in (small_folder / "val").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(DataError, match="none of the 8 images"):
        measure(find_images(small_folder, seed=0).val)
