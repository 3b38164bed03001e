"""dsimg.ds_batch: batch = micro-batch x accumulation x ranks."""

from typing import Any

import pytest

from dsimg.ds_lint import lint_ds_config
from tests.dsimg.ds_cases import lint_error, resolve, texts

AUTO = "auto"


@pytest.mark.parametrize(
    ("train", "micro", "steps", "world", "expected"),
    [
        (None, None, None, 2, (48, 24, 1)),
        (AUTO, AUTO, AUTO, 3, (48, 16, 1)),
        (None, None, 4, 2, (48, 6, 4)),
        (None, 32, None, 2, (64, 32, 1)),
        (None, 32, 8, 1, (256, 32, 8)),
        (AUTO, 8, AUTO, 2, (48, 8, 3)),
        (AUTO, 8, 2, 2, (32, 8, 2)),
        (64, None, None, 4, (64, 16, 1)),
        (64, 8, None, 2, (64, 8, 4)),
        (64, AUTO, 2, 4, (64, 8, 2)),
        (8, 2, 1, 4, (8, 2, 1)),
    ],
)
def test_batch_algebra(train: Any, micro: Any, steps: Any, world: int, expected: tuple[int, int, int]) -> None:
    given = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    raw = {key: value for key, value in given.items() if value is not None}
    sizes = lint_ds_config(raw, source="user.json", world_size=world, batch_size=48)
    assert (sizes.batch_size, sizes.micro_batch_size, sizes.accumulation_steps) == expected
    result = resolve(raw, world_size=world)
    assert (result.batch_size, result.micro_batch_size, result.accumulation_steps) == expected
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    assert f"batch: {expected[0]} = {expected[1]} images x {expected[2]} accumulated x {ranks}" in texts(result, "plan")


def test_batch_mismatch_says_the_numbers_and_the_ways_out() -> None:
    raw = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    assert lint_error(raw) == (
        "user.json: train_batch_size 8 is not 2 (train_micro_batch_size_per_gpu) x 1 (gradient_accumulation_steps) x "
        "1 (GPUs found); 4 GPUs would fit, start with so many, or set train_batch_size to 2, or set "
        "gradient_accumulation_steps to 4"
    )


@pytest.mark.parametrize(
    ("raw", "world", "message"),
    [
        (
            {},
            5,
            "the stage's batch size 48 cannot be split into 1 (gradient_accumulation_steps) x 5 GPUs; "
            "45 or 50 would fit as the batch size",
        ),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 24},
            1,
            "train_batch_size 64 cannot be split into 24 (train_micro_batch_size_per_gpu) x 1 GPU; "
            "48 or 72 would fit as the batch size",
        ),
        ({"train_batch_size": 2}, 3, "x 3 GPUs; 3 would fit as the batch size"),
    ],
)
def test_a_batch_that_does_not_divide_names_those_that_do(raw: dict[str, Any], world: int, message: str) -> None:
    assert message in lint_error(raw, world_size=world)
