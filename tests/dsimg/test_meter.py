"""`metrics.jsonl`: every step once, whatever happened in between."""

import json
from pathlib import Path

import pytest

from dsimg.errors import RunError
from dsimg.meter import MetricsFile


def test_a_resumed_file_is_cut_to_its_step_and_a_torn_line_goes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, step=0, rank=0)
    for step in (1, 2, 3):
        first.add(kind="train", step=step, loss=0.5 * step)
    with path.open("a") as stream:
        stream.write('{"kind": "train", "st')
    MetricsFile(path, step=2, rank=0).add(kind="train", step=3, loss=7.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 0.5), (2, 1.0), (3, 7.0)]


def test_what_json_lacks_is_written_as_text(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, step=0, rank=0).add(step=1, loss=float("nan"), grad_norm=float("inf"), loss_scale=None)
    assert json.loads(path.read_text()) == {"step": 1, "loss": "nan", "grad_norm": "inf", "loss_scale": None}


def test_only_rank_zero_writes(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "metrics.jsonl", step=0, rank=1).add(step=1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = MetricsFile(path, step=0, rank=0)
    path.unlink()
    path.parent.rmdir()
    with pytest.raises(RunError, match=r"cannot write .*No such file"):
        file.add(step=1)
