"""The bytes a rank needs, by the ZeRO paper's accounting. test_engine.py compares them with what is allocated."""

import pytest

from dsimg.memory import RankMemory, estimate_rank_memory

N = 1_000_000


@pytest.mark.parametrize(
    ("stage", "weight_bytes", "expected"),
    [
        (0, 4, (4, 4, 8)),
        (0, 2, (2, 2, 12)),
        (1, 4, (4, 4, 3)),
        (2, 2, (2, 0.5, 3)),
        (3, 2, (0.5, 0.5, 3)),
    ],
)
def test_adam_on_four_ranks(stage: int, weight_bytes: int, expected: tuple[float, float, float]) -> None:
    memory = estimate_rank_memory(N, zero_stage=stage, world_size=4, weight_bytes=weight_bytes, optimizer="adamw")
    parameters, gradients, optimizer = (round(value * N) for value in expected)
    assert memory == RankMemory(parameters=parameters, gradients=gradients, optimizer=optimizer)
    assert memory.total == parameters + gradients + optimizer


def test_sgd_keeps_one_value_a_weight_and_ema_another() -> None:
    plain = estimate_rank_memory(N, zero_stage=0, world_size=1, weight_bytes=4, optimizer="sgd")
    averaged = estimate_rank_memory(N, zero_stage=0, world_size=1, weight_bytes=4, optimizer="sgd", ema=True)
    assert (plain.optimizer, averaged.optimizer) == (4 * N, 8 * N)
