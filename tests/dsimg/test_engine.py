"""One behaviour at every ZeRO stage and precision, on one rank and on two."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsimg import models
from dsimg.engine import Engine
from dsimg.memory import estimate_rank_memory
from dsimg.optimizers import OptimizerSpec
from dsimg.world import start_world
from tests import nets
from tests.conftest import Launch

STAGES = (0, 1, 2, 3)
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16 autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp16 autocast": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
}


def make_engine(
    stage: int,
    precision: str = "fp32",
    *,
    clip: float = 0.0,
    optimizer: str = "sgd",
    accumulate: int = 1,
    ema: float = 0.0,
    make: Callable[[int], nn.Module] = nets.without_batchnorm,
    seed: int = 0,
) -> Engine:
    torch.manual_seed(seed)
    model = make(3)
    config = {
        "train_batch_size": 8 * accumulate,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000},
        "zero_allow_untested_optimizer": True,
        **PRECISIONS[precision],
    }
    groups = models.parameter_groups(model, 0.01)
    spec = OptimizerSpec(name=optimizer)
    engine = Engine(model, config=config, groups=groups, optimizer=spec, lr=0.1, world=start_world(), ema_decay=ema)
    engine.train()
    return engine


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 32, 32, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def one_step(engine: Engine, *, seed: int = 0, poison: bool = False) -> Any:
    images, labels = batch(seed)
    loss = nn.functional.cross_entropy(engine.forward(images), labels)
    engine.backward(loss * float("nan") if poison else loss, boundary=True)
    return engine.step(lr=0.1)


def true_gradients(seed: int = 0) -> tuple[nn.Module, float]:
    torch.manual_seed(0)
    model = nets.without_batchnorm(3)
    images, labels = batch(seed)
    nn.functional.cross_entropy(model(images), labels).backward()
    return model, float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_norm_is_the_true_one(stage: int, precision: str) -> None:
    """Before clipping and without loss scale, which DeepSpeed's own getter gives at no stage for all precisions."""
    _, expected = true_gradients()
    info = one_step(make_engine(stage, precision, clip=0.01))
    assert not info.skipped
    assert info.grad_norm == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 3e-2)
    assert (info.loss_scale == 65536.0) == (precision == "fp16 autocast")


@pytest.mark.parametrize("precision", ["fp32", "fp16 autocast"])
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_limits_the_update(stage: int, precision: str) -> None:
    """DeepSpeed 0.19.8 clips fp16 autocast's scaled gradients as if they were not: to a 65,536th of what is asked."""
    engine = make_engine(stage, precision, clip=0.01)
    before = engine.full_state()
    one_step(engine)
    after = engine.full_state()
    decay = {name for name, tensor in before.items() if tensor.dim() > 1}
    moved = [after[n] - before[n] * (1 - 0.1 * 0.01 * 1.9 * (n in decay)) for n in before]
    # Nesterov's first step is lr * (1 + momentum) * gradient.
    assert float(torch.nn.utils.get_total_norm(moved)) == pytest.approx(0.1 * 1.9 * 0.01, rel=5e-3)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(stage: int, precision: str, clip: float) -> None:
    engine = make_engine(stage, precision, clip=clip)
    one_step(engine)
    before = engine.full_state()
    info = one_step(engine, seed=1, poison=True)
    assert info.skipped
    assert not math.isfinite(info.grad_norm)
    after = engine.full_state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    next_info = one_step(engine, seed=2)
    assert not next_info.skipped
    assert engine.skipped_steps == 1
    assert all(torch.isfinite(value).all() for value in engine.full_state().values())
    if precision == "fp16 autocast":  # the scale must fall, or an overflowing one would skip every step for ever
        assert next_info.loss_scale == 32768.0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_stage_trains_to_the_same_weights(optimizer: str) -> None:
    states = []
    for stage in STAGES:
        engine = make_engine(stage, optimizer=optimizer)
        for seed in range(5):
            one_step(engine, seed=seed)
        states.append(engine.full_state())
    for state in states[1:]:
        for name, tensor in states[0].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("stage", STAGES)
def test_accumulated_micro_batches_make_one_step(stage: int) -> None:
    """Also when a step has fewer of them than the JSON says, as at an epoch's end."""
    results = []
    for accumulate, micro_batches in ((1, 1), (4, 2)):
        engine = make_engine(stage, accumulate=accumulate)
        for _ in range(micro_batches):
            images, labels = batch()
            loss = nn.functional.cross_entropy(engine.forward(images), labels)
            boundary = _ == micro_batches - 1
            engine.backward(loss * accumulate / micro_batches, boundary=boundary)
        results.append((engine.step(lr=0.1).grad_norm, engine.full_state()))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], tensor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ema_is_the_average_of_the_fp32_weights(stage: int, precision: str) -> None:
    engine = make_engine(stage, precision, ema=0.9)
    average = {name: tensor.clone() for name, tensor in engine.full_state().items()}
    for step in range(1, 4):
        one_step(engine, seed=step)
        decay = min(0.9, (1 + step) / (10 + step))  # the first weights are soon forgotten
        for name, tensor in engine.full_state().items():
            average[name].lerp_(tensor, 1 - decay)
    assert not any(tensor.requires_grad for tensor in engine.ema)  # else they hold a graph of all steps
    trained = engine.full_state()
    images, _ = batch()
    engine.eval()
    plain = engine.forward(images)
    with engine.ema_weights():
        averaged = engine.full_state()
        assert not torch.equal(engine.forward(images), plain)
    for name, tensor in average.items():
        torch.testing.assert_close(averaged[name], tensor, rtol=1e-6, atol=1e-7)
    assert torch.equal(engine.forward(images), plain)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in engine.full_state().items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_fragments_cover_each_parameter_once(stage: int, precision: str) -> None:
    engine = make_engine(stage, precision)
    reference, _ = true_gradients()
    covered = {fragment.name: fragment for fragment in engine.fragments()}
    for name, parameter in reference.named_parameters():
        fragment = covered.pop(name)
        assert (fragment.start, fragment.numel, fragment.shape) == (0, parameter.numel(), tuple(parameter.shape))
        torch.testing.assert_close(fragment.view(fragment.owner).view_as(parameter), parameter.data, rtol=0, atol=1e-2)
    assert not covered


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_memory_estimate_is_what_is_allocated(stage: int, precision: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 512), nn.ReLU(), nn.Linear(512, 3))
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000},
        **PRECISIONS[precision],
    }
    groups = models.parameter_groups(model, 0.0)
    engine = Engine(
        model, config=config, groups=groups, optimizer=OptimizerSpec(name="adamw"), lr=0.1, world=start_world()
    )
    engine.train()
    one_step(engine)
    images, labels = batch()
    engine.backward(nn.functional.cross_entropy(engine.forward(images), labels), boundary=True)
    measured = engine.allocated_bytes()
    estimate = estimate_rank_memory(
        3073 * 512 - 512 + 512 + 513 * 3,
        zero_stage=stage,
        world_size=1,
        weight_bytes=4 if precision == "fp32" else 2,
        optimizer="adamw",
    )
    assert measured["parameters"] == pytest.approx(estimate.parameters, rel=0.1)
    assert measured["gradients"] == pytest.approx(estimate.gradients, rel=0.1)
    assert measured["optimizer"] == pytest.approx(estimate.optimizer, rel=0.1)


def test_two_ranks_agree_with_one(launch: Launch, tmp_path: Path) -> None:
    """Losses, pooled BatchNorm, weights and checkpoints across worlds and stages: see rank_program.py."""
    for name, size in (("one", 1), ("two", 2)):
        results = launch(size, "-m", "tests.dsimg.rank_program", str(tmp_path), name)
        assert [result.returncode for result in results] == [0] * size, results[0].stdout[-3000:]
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    for stage in STAGES:
        assert two["losses"][str(stage)] == pytest.approx(one["losses"]["0"], rel=1e-5)
        for world in (one, two):
            without, with_evaluation = world["evaluated"][str(stage)]
            assert with_evaluation == without
    assert two["pooled_mean"] == pytest.approx(two["expected_mean"], rel=1e-5)
    assert two["pooled_var"] == pytest.approx(two["expected_var"], rel=1e-4)
    assert two["restored"] == {f"{a}->{b}": True for a in STAGES for b in STAGES}


@pytest.mark.parametrize("stage", STAGES)
def test_a_skipped_step_leaves_batchnorms_statistics_alone(stage: int) -> None:
    """One batch with NaN in it would make them NaN for good, and every evaluation with them."""
    engine = make_engine(stage, ema=0.5, make=nets.with_batchnorm)
    one_step(engine)
    before = {name: buffer.clone() for name, buffer in engine.buffers().items() if "running" in name}
    images, labels = batch()
    images[0, 0, 0, 0] = math.nan
    engine.backward(nn.functional.cross_entropy(engine.forward(images), labels), boundary=True)
    assert engine.step(lr=0.1).skipped
    after = engine.buffers()
    assert len(before) == 4
    assert all(torch.equal(after[name], buffer) for name, buffer in before.items())
    one_step(engine)
    assert not torch.equal(engine.buffers()["1.running_mean"], before["1.running_mean"])


def test_ema_averages_batchnorm_statistics_too() -> None:
    engine = make_engine(0, ema=0.9, make=nets.with_batchnorm)
    average = torch.zeros(8)
    for step in range(1, 4):
        one_step(engine, seed=step)
        average.lerp_(engine.full_state()["1.running_mean"], 1 - (1 + step) / (10 + step))
    with engine.ema_weights():
        torch.testing.assert_close(engine.full_state()["1.running_mean"], average)
    assert not torch.allclose(engine.full_state()["1.running_mean"], average)


class Tied(nn.Module):
    """Two names for one weight, and a layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3 * 32 * 32, 8)
        self.frozen.requires_grad_(False)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, 32, 32) -> logits (N, 8)."""
        hidden: Tensor = self.second(self.first(self.frozen(images.flatten(1))).relu())
        return hidden


@pytest.mark.parametrize("stage", STAGES)
def test_tied_and_frozen_weights_are_saved_whole(stage: int) -> None:
    torch.manual_seed(0)
    model = Tied()
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    frozen = model.frozen.weight.detach().clone()
    groups = models.parameter_groups(model, 0.0)
    spec = OptimizerSpec(name="sgd")
    engine = Engine(model, config=config, groups=groups, optimizer=spec, lr=0.1, world=start_world())
    engine.train()
    one_step(engine)
    state = engine.full_state()
    assert set(state) == set(Tied().state_dict())
    assert torch.equal(state["frozen.weight"], frozen)
    assert torch.equal(state["first.weight"], state["second.weight"])
    Tied().load_state_dict(state)


def test_fp16_autocasts_scale_grows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsimg.engine.SCALE_GROWTH_STEPS", 3)
    engine = make_engine(2, "fp16 autocast")
    scales = [one_step(engine, seed=seed).loss_scale for seed in range(4)]
    assert scales == [65536.0, 65536.0, 65536.0, 131072.0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_closed_engine_gives_its_memory_back_and_another_one_trains(stage: int, precision: str) -> None:
    """DeepSpeed keeps its engines for good: pruning in several cuts would keep every earlier network."""
    first = make_engine(stage, precision, ema=0.9)
    one_step(first)
    held = [*first.owners(), *first.module.parameters()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held)
    first.close()
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0] * len(held)
    assert not one_step(make_engine(stage, precision)).skipped
