"""The flags of `dsimg train`, checked where they enter."""

from pathlib import Path
from typing import Any

import pytest

from dsimg.errors import DsimgError
from dsimg.recipe import TrainConfig


@pytest.mark.parametrize("field", ["epochs", "batch_size", "image_size", "log_steps"])
def test_a_flag_out_of_range_is_refused(field: str) -> None:
    with pytest.raises(DsimgError, match=f"--{field} is 0; it must be at least 1"):
        TrainConfig(**{field: 0})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"seed": -1}, "--seed is -1"),
        ({"momentum": -0.1}, "--momentum is -0.1"),
        ({"step_epochs": 5}, "--step_epochs goes with --schedule step"),
        ({"schedule": "one_cycle", "warmup_epochs": 1.0}, "Leave --warmup_epochs away"),
        ({"ema": 1.0}, "--ema is 1.0"),
        ({"mixup": float("nan")}, "--mixup is nan"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(DsimgError, match=message):
        TrainConfig(**flags)


def test_the_run_is_named_after_the_data_unless_it_is_named() -> None:
    assert TrainConfig().run_path == Path("runs/digits")
    assert TrainConfig(data="/data/flowers/").run_path == Path("runs/flowers")
    assert TrainConfig(out=Path("x")).run_path == Path("x")
