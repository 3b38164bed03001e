"""The learning rate, step by step."""

import math

import pytest

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


def test_one_cycle_peaks_at_three_tenths() -> None:
    schedule = Schedule(name="one_cycle", peak=2.0, steps=10, warmup_steps=0)
    rates = [schedule.at(step) for step in range(11)]
    assert rates[2] == 2.0 == max(rates)
    assert rates[:3] == pytest.approx([2 / 3, 4 / 3, 2.0])
    assert rates[10] == 0.0
    assert rates[3:] == sorted(rates[3:], reverse=True)
