"""What safety costs: time per step with and without it, in turn in one run, and what one save takes.

    deepspeed --quiet --num_gpus 2 benchmarks/safety_cost.py --data DIR [--rounds 15] [--stages 0 2 3]

DIR holds class folders of 32 x 32 images (CIFAR-10's train/). With it: after each step the ranks exchange loss,
requests to stop, time to save; spikes, skipped steps and the ranks' weights are looked at; threads listen for signals
and for the other ranks. Without it: the step is counted and, every tenth, recorded. Saves are left out of both, and
measured apart: how long training stood still, how long the thread wrote beside it, how large a rank's shard is.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from train_step import BATCH, Unwatched, WholeLoop, WithoutSaves, ds_config, first_images, seconds

from dsimg import models
from dsimg.checkpoint import Saver
from dsimg.console import Terminal, bytes_text
from dsimg.engine import Engine
from dsimg.folder import find_images
from dsimg.losses import cross_entropy
from dsimg.optimizers import OptimizerSpec
from dsimg.world import World, start_world


def step_cost(arch: str, stage: int, world: World, options: argparse.Namespace) -> str:
    """Return the ratio of the time per step with safety to that without."""
    split = first_images(find_images(options.data, seed=0).train, options.steps * BATCH)
    with tempfile.TemporaryDirectory() as folder:
        loops = [
            WholeLoop(arch, stage, world, split, steps=options.steps, folder=Path(folder), control=control)
            for control in (WithoutSaves, Unwatched)
        ]
        for contestant in loops:
            contestant(options.steps)  # warm-up
        rounds = []
        for number in range(options.rounds):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            took = {index: seconds(loops[index], options.steps, world) for index in order}
            rounds.append((took[0], took[1]))
        for contestant in loops:
            contestant.close()
    ratios = [with_it / without for with_it, without in rounds]
    of_medians = statistics.median(row[0] for row in rounds) / statistics.median(row[1] for row in rounds)
    step = statistics.median(row[0] for row in rounds) / options.steps
    return f"{arch:<16} {stage:>5} {1000 * step:>10.1f} {of_medians:>10.3f}  {min(ratios):.3f}-{max(ratios):.3f}"


def save_cost(arch: str, stage: int, world: World, saves: int = 5) -> str:
    """Return what a save takes after a step of AdamW, the median of some."""
    model = models.build_model(arch, num_classes=1000, input_size=224)
    engine = Engine(
        model,
        config=ds_config(stage, world, model),
        groups=models.parameter_groups(model, 0.05),
        optimizer=OptimizerSpec(name="adamw"),
        lr=1e-3,
        world=world,
    )
    images = torch.randn(2, 3, 224, 224, device=world.device)
    labels = torch.zeros(2, dtype=torch.long, device=world.device)
    paused, wrote = [], []
    with tempfile.TemporaryDirectory(dir=os.environ.get("SAVE_TO")) as folder:
        shared = Path(world.gather(folder)[0])
        saver = Saver(shared, engine, keep=2, on_error="stop", saved_step=None, terminal=Terminal(rank=1))
        for step in range(1, saves + 2):
            engine.train()
            output = engine.forward(images)
            engine.backward(cross_entropy(output, labels, label_smoothing=0.0).mean(), boundary=True)
            engine.step(lr=1e-3)
            before = saver.paused
            saver.begin({"step": step})
            while world.gather(saver.written).count(True) != world.size:
                time.sleep(0.05)
            saver.finish()
            paused.append(saver.paused - before)
            wrote.append(saver.write_seconds)
        world.barrier()
    # The first is left out: its memory is new.
    return (
        f"{arch:<16} {stage:>5} {statistics.median(paused[1:]):>12.2f} {statistics.median(wrote[1:]):>12.2f} "
        f"{bytes_text(saver.shard_bytes):>14}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 2, 3])
    parser.add_argument("--models", nargs="*", default=["resnet18", "vit_b_16"], help="whose saves are measured")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int)
    options = parser.parse_args(argv)
    world = start_world()
    say = print if world.rank == 0 else lambda *_, **__: None
    say(f"batch {BATCH}, {world.size} ranks, {world.device.type}, {options.rounds} rounds of {options.steps} steps")
    say("model            stage    ms/step  with / without  (least-most)")
    for stage in options.stages:
        say(step_cost("cifar_resnet20", stage, world, options), flush=True)
    say("model            stage  s paused for  s written beside   shard of a rank")
    for arch in options.models:
        say(save_cost(arch, 2, world), flush=True)
    world.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
