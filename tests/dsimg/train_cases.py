"""What the tests of the train stage share: a quick recipe, a run's metrics, and a run that stops half-way."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsimg.loop import fit as real_fit
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


def stop_after_one_epoch(config: TrainConfig) -> None:
    """Train as if the process ended in the second epoch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsimg.train.loop.fit", _fit_one_epoch)
        with pytest.raises(KeyboardInterrupt):
            train(config)


def _fit_one_epoch(*arguments: Any, epochs: int, **options: Any) -> None:
    real_fit(*arguments, epochs=1, **options)
    raise KeyboardInterrupt
