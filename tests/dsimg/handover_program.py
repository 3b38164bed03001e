"""Run on several ranks by test_handover.py: `dsimg train`, noting each sample that a step took and each state loaded.

`python -m tests.dsimg.handover_program NOTES FLAGS...` writes NOTES/samples_RANK.jsonl and, where the run resumes,
NOTES/loaded/, a checkpoint of the engine as it was after loading.
"""

import json
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import dsimg.session
import dsimg.train
from dsimg import cli, data
from dsimg.checkpoint import load_checkpoint
from dsimg.engine import Engine
from tests.dsimg.train_cases import save_now

NOTES = Path(sys.argv[1])
_real_epoch = data.TrainLoader.epoch


def _noting_epoch(self: data.TrainLoader, epoch: int, *, start_step: int = 0) -> Generator[data.Batch]:
    with (NOTES / f"samples_{os.environ['RANK']}.jsonl").open("a") as stream:
        for batch in _real_epoch(self, epoch, start_step=start_step):
            counted = batch.ids[batch.weights.numpy() > 0].tolist()
            stream.write(json.dumps({"epoch": epoch, "ids": counted}) + "\n")
            yield batch


def _noting_load(path: Path, state: Mapping[str, Any], engine: Engine) -> None:
    load_checkpoint(path, state, engine)
    save_now(NOTES / "loaded", engine, step=state["step"])


if __name__ == "__main__":
    data.TrainLoader.epoch = _noting_epoch  # type: ignore[method-assign]
    dsimg.session.load_checkpoint = _noting_load
    cli.run(dsimg.train.train, sys.argv[2:])
