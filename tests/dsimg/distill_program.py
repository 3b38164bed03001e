"""Run on two ranks by test_distill.py: `python -m tests.dsimg.distill_program FOLDER`.

A sharded and a whole teacher side by side, runs to the end at ZeRO 2 and 3, one that replays the first one's cache, one
that is stopped, and one that is killed.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsimg.distill import DistillConfig, distill
from dsimg.errors import StopRequested
from dsimg.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from dsimg.teacher import Member, Teacher
from dsimg.world import start_world
from tests import nets
from tests.dsimg.train_cases import FAST

KILL_AT = "DSIMG_TEST_KILL_AT"
STAGES = ("zero2", "zero3")


class Broad(nn.Sequential):
    """A teacher with a layer that ZeRO-3 really shares out: smaller ones stay whole."""

    def __init__(self, num_classes: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            super().__init__(
                nn.Conv2d(3, 8, 3, stride=4, padding=1),
                nn.BatchNorm2d(8),
                nn.Flatten(),
                nn.Linear(512, 400),
                nn.ReLU(),
                nn.Linear(400, num_classes),
            )


class Student(nn.Module):
    """A student with BatchNorm, dropout and a layer that ZeRO-3 shares out, which kills its process on demand."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.body = nets.Tiny(num_classes=num_classes, norm=True)
        self.wide = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 40), nn.ReLU(), nn.Linear(40, num_classes))
        self.forwards = 0

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, 32, 32) -> logits (N, num_classes)."""
        self.forwards += self.training and images.device.type != "meta"
        if str(self.forwards) == os.environ.get(KILL_AT):
            os.kill(os.getpid(), signal.SIGKILL)
        images = self.dropout(images)
        logits: Tensor = self.body(images) + self.wide(images)
        return logits


def flags(folder: Path, stage: str, name: str) -> dict[str, Any]:
    """Return the config of a run in `folder`."""
    return {
        **FAST,
        "epochs": 3,
        "source": ("tests.dsimg.distill_program:Broad",),
        "model": "tests.dsimg.distill_program:Student",
        "data": str(folder / "data"),
        "out": folder / f"{stage}_{name}",
        "deepspeed_config": stage,
        "teacher_shard": "yes" if stage == "zero3" else "no",
        "teacher_precision": "fp32",
        "cache_teacher": folder / f"{stage}_{name}_cache",
        "mixup": 0.2,
        "ema": 0.9,
        "log_steps": 1,
    }


def words(values: dict[str, Any]) -> list[str]:
    """Return the same config as flags of the command."""
    return [
        word
        for name, value in values.items()
        for word in (f"--{name}", *map(str, value if isinstance(value, tuple) else (value,)))
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    world = start_world()
    result: dict[str, Any] = {}
    student = DistillConfig(**flags(folder, "zero2", "whole"))
    preprocess = Preprocess(input_size=(3, 32, 32), mean=IMAGENET_MEAN, std=IMAGENET_STD, crop_pct=1.0)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(world.rank))
    said = []
    for sharded in (False, True):
        member = Member("x", "x", Broad(2), preprocess, (1, 0))
        teacher = Teacher([member], student=preprocess, world=world, precision="fp32", sharded=sharded)
        said.append(teacher.logits(images))
        result[f"held_{sharded}"] = member.model[3].weight.numel()  # type: ignore[index, union-attr]
    result["equal"] = bool(world.sum(torch.tensor([float(torch.equal(*said))])) == world.size)
    for stage in STAGES:
        distill(DistillConfig(**flags(folder, stage, "whole")))
    distill(dataclasses.replace(student, out=folder / "zero2_replayed"))
    stopped = DistillConfig(**flags(folder, "zero3", "cut"), max_steps=5)  # within the second epoch of three steps
    try:
        distill(stopped)
    except StopRequested as error:
        result["stopped"] = str(error)
    if world.rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    world.barrier()
    os.environ[KILL_AT] = "8"  # within the third: the checkpoint of the first is whole when that of the second is begun
    distill(DistillConfig(**flags(folder, "zero2", "cut")))


if __name__ == "__main__":
    main()
