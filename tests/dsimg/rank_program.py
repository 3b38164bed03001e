"""Run on one or two ranks by test_engine.py: `python -m tests.dsimg.rank_program FOLDER NAME` writes NAME.json."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsimg import models
from dsimg.checkpoint import load_checkpoint
from dsimg.engine import Engine
from dsimg.optimizers import OptimizerSpec
from dsimg.shards import read_state
from dsimg.world import World, start_world
from tests import nets
from tests.dsimg.train_cases import save_now

STAGES = (0, 1, 2, 3)


def make_engine(world: World, stage: int, *, seed: int = 0, norm: bool = False, ema: float = 0.0) -> Engine:
    torch.manual_seed(seed)
    model = nets.Tiny(num_classes=3, norm=norm)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8 // world.size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1000,
            "allgather_bucket_size": 1000,
            "stage3_param_persistence_threshold": 100,
        },
    }
    spec = OptimizerSpec(name="adamw")
    engine = Engine(
        model,
        config=config,
        groups=models.parameter_groups(model, 0.01),
        optimizer=spec,
        lr=0.1,
        world=world,
        ema_decay=ema,
    )
    engine.train()
    return engine


def take_steps(engine: Engine, world: World, first: int, last: int) -> list[float]:
    losses = []
    share = 8 // world.size
    for seed in range(first, last):
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(8, 3, 32, 32, generator=generator) * (1 + torch.arange(8).view(8, 1, 1, 1))
        labels = torch.randint(0, 3, (8,), generator=generator)
        mine = slice(world.rank * share, (world.rank + 1) * share)
        loss = nn.functional.cross_entropy(engine.forward(images[mine]), labels[mine])
        engine.backward(loss, boundary=True)
        engine.step(lr=0.01)
        losses.append(float(world.sum(loss.detach().clone())) / world.size)
    return losses


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    world = start_world()
    result: dict[str, Any] = {"losses": {}, "evaluated": {}, "restored": {}}
    for stage in STAGES:
        result["losses"][str(stage)] = take_steps(make_engine(world, stage), world, 0, 6)

    # BatchNorm: pooled statistics are those of the ranks' together.
    engine = make_engine(world, 0, norm=True)
    take_steps(engine, world, 0, 3)
    layer = next(m for m in engine.module.modules() if isinstance(m, nn.BatchNorm2d))
    assert layer.running_mean is not None
    assert layer.running_var is not None
    parts = world.gather((layer.running_mean.clone(), layer.running_var.clone()))
    mean = torch.stack([part[0] for part in parts]).mean(0)
    second = torch.stack([part[1] + part[0].square() for part in parts]).mean(0)
    engine.pool_batchnorm()
    result["expected_mean"], result["expected_var"] = mean.tolist(), (second - mean.square()).tolist()
    result["pooled_mean"], result["pooled_var"] = layer.running_mean.tolist(), layer.running_var.tolist()

    # An evaluation with the averaged weights leaves no trace of them. (ZeRO-3 kept parameters gathered across it.)
    for stage in STAGES:
        losses = []
        for evaluates in (False, True):
            engine = make_engine(world, stage, norm=True, ema=0.9)
            take_steps(engine, world, 0, 3)
            if evaluates:
                engine.eval()
                with engine.ema_weights(), torch.no_grad():
                    for _ in range(3):
                        engine.forward(torch.zeros(4, 3, 32, 32))
                engine.train()
            losses.append(take_steps(engine, world, 3, 6))
        result["evaluated"][str(stage)] = losses

    # A checkpoint of any stage goes on at any other, as if nothing had happened.
    for saved in STAGES:
        engine = make_engine(world, saved, norm=True, ema=0.9)
        take_steps(engine, world, 0, 3)
        engine.pool_batchnorm()
        path = save_now(folder / f"{name}_{saved}", engine, step=3)
        expected = take_steps(engine, world, 3, 6)
        with engine.ema_weights():
            expected_average = engine.full_state()
        for loaded in STAGES:
            other = make_engine(world, loaded, seed=99, norm=True, ema=0.9)
            state = read_state(path)
            load_checkpoint(path, state, other)
            other.load_counters(state["engine"])
            got = take_steps(other, world, 3, 6)
            with other.ema_weights():
                average = other.full_state()
            same = state["step"] == 3 and torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=1e-4)
            same = same and all(
                torch.allclose(average[key], tensor, rtol=1e-3, atol=1e-4) for key, tensor in expected_average.items()
            )
            result["restored"][f"{saved}->{loaded}"] = bool(same)
    if world.rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(result))
    world.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
