"""What is counted and judged step by step; what it does to a run is in test_control.py."""

import math

import pytest
import torch

from dsimg.engine import StepInfo
from dsimg.health import Health
from dsimg.world import start_world
from tests.dsimg.rank_program import make_engine, take_steps


def info(*, skipped: bool) -> StepInfo:
    return StepInfo(lr=0.1, grad_norm=math.nan if skipped else 1.0, skipped=skipped, skipped_steps=0, loss_scale=None)


def test_skipped_steps_count_in_a_row_and_over_a_stop() -> None:
    engine = make_engine(start_world(), 0)
    health = Health(engine, max_skipped=2)
    steps = (True, True, False, True, True)
    assert [health.skipped_too_often(info(skipped=skipped)) for skipped in steps] == [False] * 5
    resumed = Health(engine, max_skipped=2, state=health.state())
    assert resumed.skipped_too_often(info(skipped=True))


def test_a_spike_is_twice_the_mean_of_the_ten_before() -> None:
    engine = make_engine(start_world(), 0)
    health = Health(engine, max_skipped=0)
    assert [health.spike(1.0) for _ in range(10)] == [None] * 10
    assert health.spike(math.nan) is None
    assert health.spike(1.9) is None
    resumed = Health(engine, max_skipped=0, state=health.state())
    assert resumed.spike(2.18) == pytest.approx(1.09)
    assert health.spike(2.17) is None


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_checksums_tell_weights_apart(stage: int) -> None:
    """At ZeRO-3 only the small parameters are whole on every rank."""
    world = start_world()
    engine = make_engine(world, stage)
    take_steps(engine, world, 0, 1)  # until then ZeRO-3 has gathered none
    names, sums = engine.checksums()
    everything = [name for name, _ in engine.module.named_parameters()]
    assert names == (everything if stage < 3 else ["0.bias", "1.weight", "1.bias", "3.bias", "6.bias"])
    assert torch.equal(engine.checksums()[1], sums)
    bias = dict(engine.module.named_parameters())["0.bias"]
    with torch.no_grad():
        bias[3] = torch.nextafter(bias[3], torch.tensor(9.0))
    changed = (engine.checksums()[1] != sums).nonzero().flatten().tolist()
    assert [names[index] for index in changed] == ["0.bias"]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_parameter_with_the_largest_gradient_is_found(stage: int) -> None:
    engine = make_engine(start_world(), stage)
    images = torch.randn(8, 3, 32, 32)
    with engine.largest_gradients() as largest:
        logits = engine.forward(images)
        engine.backward(logits[:, 0].sum(), boundary=True)
    # The last bias' gradient is 8 for the first class; a nan wins over all.
    assert largest["6.bias"] == 8.0
    assert largest.keys() == {name for name, _ in engine.module.named_parameters()}
    with engine.largest_gradients() as largest:
        logits = engine.forward(images)
        engine.backward((logits * math.inf).sum(), boundary=True)
    assert not math.isfinite(largest["6.weight"])
