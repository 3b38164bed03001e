"""What the tests of the train stage share: a quick recipe, a run's metrics, and a run that stops half-way."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dsimg.checkpoint import Saver
from dsimg.console import Terminal
from dsimg.engine import Engine
from dsimg.errors import StopRequested
from dsimg.shards import checkpoints
from dsimg.train import TrainConfig, train

FAST: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 8,
    "model": "tests.nets:with_batchnorm",
    "augment": "light",
    "lr": 0.5,
}


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Return the lines of a kind of a run's metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def stop_after(config: TrainConfig, steps: int) -> None:
    """Train as if a person asked it to stop after so many optimizer steps; two make an epoch of `small_folder`."""
    with pytest.raises(StopRequested, match=f"stopped by --max_steps {steps} "):
        train(dataclasses.replace(config, max_steps=steps))


def save_now(folder: Path, engine: Engine, *, step: int, keep: int = 2) -> Path:
    """Save a checkpoint of an engine and wait for it. All ranks take part."""
    saver = Saver(folder, engine, keep=keep, on_error="stop", saved_step=None, terminal=Terminal(rank=1))
    saver.begin({"step": step, "engine": engine.counters()})
    saver.finish()
    return checkpoints(folder)[0]
