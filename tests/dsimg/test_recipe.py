"""The flags of the stages that train, checked where they enter."""

from pathlib import Path
from typing import Any

import pytest

from dsimg.errors import DsimgError
from dsimg.recipe import DistillConfig, TrainConfig


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"temperature": 0.0}, r"--temperature is 0\.0; it must be a positive number"),
        ({"temperature": float("inf")}, "--temperature is inf"),
        ({"alpha": -0.5}, r"--alpha is -0\.5; it must be a number of at least 0"),
        ({"loss": "kd", "alpha": 1.5}, r"--alpha is 1\.5; with --loss kd it is the teacher's share, at most 1"),
        ({"loss": "hint"}, "--loss hint and --hint_layers go together"),
        ({"hint_layers": ("layer3",)}, "--loss hint and --hint_layers go together"),
        (
            {"loss": "hint", "hint_layers": ("layer3",), "cache_teacher": Path("c")},
            "--cache_teacher keeps logits, and --loss hint needs features",
        ),
        (
            {"loss": "hint", "hint_layers": ("layer3",), "source": ("a", "b")},
            "--loss hint compares the features of one teacher",
        ),
        ({"loss": "dkd", "mixup": 0.2}, "--loss dkd sets the true class apart, and --mixup and --cutmix make images"),
        ({"loss": "dkd", "cutmix": 1.0}, "--loss dkd sets the true class apart"),
        ({"source": ()}, r"--source names no teacher\. Give a run folder"),
        ({"model": None}, "distill needs the student: --model resnet18, or --weights of a run"),
        ({"image_size": 0}, "--image_size is 0"),
        ({"epochs": 0}, "--epochs is 0"),
    ],
)
def test_flags_of_distill_that_make_no_sense_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(DsimgError, match=message):
        DistillConfig(**{"source": ("runs/teacher",), "model": "resnet18", **flags})


def test_what_goes_together_is_taken() -> None:
    for flags in (
        {"loss": "kd", "alpha": 1.0, "mixup": 0.2, "cutmix": 1.0},
        {"loss": "hint", "hint_layers": ("layer3", "layer4:blocks.3")},
        {"alpha": 30.0, "cache_teacher": Path("c"), "mixup": 0.2},
        {"model": None, "weights": "runs/before"},
    ):
        assert DistillConfig(**{"source": ("runs/teacher",), "model": "resnet18", **flags}).loss in (
            "kd",
            "hint",
            "dist",
        )


def test_a_distilled_run_is_named_after_teacher_and_student() -> None:
    assert DistillConfig(source=("runs/big/",), model="resnet18").run_path == Path("runs/big-resnet18")
    assert DistillConfig(source=("a.b:c", "x"), model="my.nets:tiny").run_path == Path("runs/a.b:c-tiny")
    assert DistillConfig(source=("runs/big",), weights="w").run_path == Path("runs/big-student")
    assert DistillConfig(source=("runs/big",), model="m", out=Path("x")).run_path == Path("x")
