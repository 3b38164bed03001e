"""Bytes per rank that the plan promises against those that are allocated, for a network under ZeRO.

    deepspeed --quiet --num_gpus 2 benchmarks/rank_memory.py [--model vit_b_16] [--image_size 224] [--precision bf16]

Two steps of one image per rank are taken with AdamW. Counted are the storages of parameters, gradients (between
backward and step) and optimizer states, fp32 masters included, on rank 0. Last comes the ratio of stage 3 to stage 0.
"""

import argparse
import os

import torch
from torch import nn

from dsimg import models
from dsimg.ds_config import StageDefaults, resolve_ds_config
from dsimg.ds_json import find_ds_config, read_ds_config
from dsimg.engine import Engine
from dsimg.memory import RankMemory, estimate_rank_memory
from dsimg.optimizers import OptimizerSpec
from dsimg.world import World, start_world


def measure(arch: str, image_size: int, stage: int, precision: str, world: World) -> tuple[RankMemory, dict[str, int]]:
    """Return the plan's estimate and what is allocated, in bytes."""
    torch.manual_seed(0)
    model = models.build_model(arch, num_classes=1000, input_size=image_size)
    source = find_ds_config(f"zero{stage}")
    raw = read_ds_config(source) | {"bf16": {"enabled": precision == "bf16"}}
    defaults = StageDefaults(
        batch_size=world.size,
        lr=1e-3,
        weight_decay=0.0,
        momentum=0.9,
        optimizer="adamw",
        total_steps=2,
        warmup_steps=0,
        gradient_clipping=None,
    )
    ds = resolve_ds_config(
        raw,
        source=str(source),
        world_size=world.size,
        device=world.device.type,
        has_batchnorm=models.has_batchnorm(model),
        bf16_fast=True,
        parameter_count=models.count_parameters(model),
        defaults=defaults,
    )
    estimate = estimate_rank_memory(
        models.count_parameters(model),
        zero_stage=ds.zero_stage,
        world_size=world.size,
        weight_bytes=2 if ds.precision == "bf16" else 4,
        optimizer="adamw",
    )
    groups = models.parameter_groups(model, 0.0)
    spec = OptimizerSpec(name="adamw")
    engine = Engine(model, config=ds.config, groups=groups, optimizer=spec, lr=1e-3, world=world)
    engine.train()
    measured: dict[str, int] = {}
    for _ in range(2):
        images = torch.randn(1, 3, image_size, image_size, device=world.device)
        labels = torch.zeros(1, dtype=torch.long, device=world.device)
        loss = nn.functional.cross_entropy(engine.forward(images), labels)
        engine.backward(loss, boundary=True)
        measured = engine.allocated_bytes()  # the second time with the optimizer's states
        engine.step(lr=1e-3)
    return estimate, measured


def main() -> None:
    """Print a line for each stage and kind of bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_b_16")
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--local_rank", type=int)
    options = parser.parse_args()
    world = start_world()
    totals: dict[int, int] = {}
    for stage in (0, 3):
        estimate, measured = measure(options.model, options.image_size, stage, options.precision, world)
        totals[stage] = sum(measured.values())
        if world.rank == 0:
            print(
                f"{options.model} {options.precision} zero{stage} on {world.size} ranks, MiB: planned, measured, ratio"
            )
            for name, planned in (
                ("parameters", estimate.parameters),
                ("gradients", estimate.gradients),
                ("optimizer", estimate.optimizer),
            ):
                ratio = planned / measured[name]
                print(f"  {name:<12} {planned / 2**20:>9.1f} {measured[name] / 2**20:>9.1f} {ratio:>7.3f}", flush=True)
    if world.rank == 0:
        print(f"stage 3 / stage 0: {totals[3] / totals[0]:.3f}", flush=True)
    world.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
