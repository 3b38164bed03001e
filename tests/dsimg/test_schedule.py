"""The learning rate, step by step."""

import math

import pytest
import torch

from dsimg.schedule import Schedule, scale_lr


@pytest.mark.parametrize(("scaling", "expected"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_lr_is_for_a_batch_of_256(scaling: str, expected: float) -> None:
    assert scale_lr(0.1, batch_size=1024, scaling=scaling) == pytest.approx(expected)


def test_cosine_rises_linearly_then_falls_to_zero() -> None:
    schedule = Schedule(name="cosine", peak=1.0, steps=10, warmup_steps=2)
    assert [schedule.at(step) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert schedule.at(6) == pytest.approx(0.5)
    assert schedule.at(9) == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert schedule.at(10) == pytest.approx(0.0)


def test_steps_divide_by_ten() -> None:
    schedule = Schedule(name="step", peak=1.0, steps=9, warmup_steps=0, milestones=(3, 6))
    assert [schedule.at(step) for step in range(9)] == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01])


@pytest.mark.parametrize("steps", [10, 100, 1173])
def test_one_cycle_is_that_of_torch(steps: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2.0, total_steps=steps, cycle_momentum=False)
    ours = Schedule(name="one_cycle", peak=2.0, steps=steps, warmup_steps=0)
    for step in range(steps):
        assert ours.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        if step < steps - 1:
            theirs.step()


def test_a_run_of_few_steps_has_a_schedule_too() -> None:
    for name in ("cosine", "step", "one_cycle"):
        for steps in (1, 2, 3):
            schedule = Schedule(name=name, peak=1.0, steps=steps, warmup_steps=1, milestones=())
            assert all(0 < schedule.at(step) <= 1 for step in range(steps))
