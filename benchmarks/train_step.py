"""images/s of dsimg's whole training loop against a bare DeepSpeed loop and a bare PyTorch loop, in turn in one run.

    deepspeed --quiet --num_gpus 2 benchmarks/train_step.py --data DIR [--model cifar_resnet20 --model resnet18]

DIR holds class folders of 32 x 32 images (CIFAR-10's train/). The bare loops train on one random channels_last batch
that is already in memory, without logging, augmentation or a learning-rate schedule; like dsimg, without DeepSpeed's
shared-memory operator, which would have to be compiled. dsimg's loop decodes nothing (the
images are in RAM), but picks, crops, flips, normalises, counts, agrees with the other ranks and writes metrics.jsonl.
Each round runs all of them for the same number of steps; the figures are medians over rounds, of ratios within a round.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dsimg import data, loop, models
from dsimg.augment import Augmentation
from dsimg.checkpoint import Saver
from dsimg.console import Terminal
from dsimg.control import Control, Limits, Position
from dsimg.ds_config import StageDefaults, resolve_ds_config
from dsimg.ds_json import find_ds_config, read_ds_config
from dsimg.engine import Engine, StepInfo
from dsimg.folder import Split, find_images
from dsimg.health import Health
from dsimg.losses import cross_entropy
from dsimg.meter import Meter, MetricsFile
from dsimg.optimizers import OptimizerSpec
from dsimg.steps import StepPlan
from dsimg.stop import StopWatch
from dsimg.watch import RankWatch, open_store
from dsimg.world import World, bf16_is_fast, start_world

# isort: split
import deepspeed  # after dsimg.world, which tells it the device

BATCH = 128
LOG_STEPS = 10
STAGES = (0, 1, 2, 3)


def ds_config(stage: int, world: World, model: nn.Module) -> dict[str, Any]:
    """Return what the shipped zeroN.json becomes for this model, these ranks and this device."""
    source = find_ds_config(f"zero{stage}")
    defaults = StageDefaults(
        batch_size=BATCH,
        lr=0.01,
        weight_decay=5e-4,
        momentum=0.9,
        optimizer="sgd",
        total_steps=1000,
        warmup_steps=0,
        gradient_clipping=0.0,
    )
    return resolve_ds_config(
        read_ds_config(source),
        source=str(source),
        world_size=world.size,
        device=world.device.type,
        has_batchnorm=True,
        bf16_fast=bf16_is_fast(world.device),
        parameter_count=models.count_parameters(model),
        defaults=defaults,
    ).config


def bare_deepspeed(arch: str, stage: int, world: World) -> Callable[[int], None]:
    """Return a function that takes so many steps of the loop in DeepSpeed's own examples."""
    model = models.build_model(arch, num_classes=10, input_size=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    engine, _, _, _ = deepspeed.initialize(
        model=model.to(world.device),
        optimizer=optimizer,
        config=ds_config(stage, world, model),
        dist_init_required=False,
    )
    images, labels = random_batch(BATCH // world.size, world)

    def steps(count: int) -> None:
        engine.train()
        for _ in range(count):
            loss = nn.functional.cross_entropy(engine(images), labels)
            engine.backward(loss)
            engine.step()

    return steps


def bare_torch(arch: str, world: World, *, channels_last: bool) -> Callable[[int], None]:
    """Return a function that takes steps of a one-process PyTorch loop with all threads of the machine (rank 0)."""
    model = models.build_model(arch, num_classes=10, input_size=32).to(world.device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    images, labels = random_batch(BATCH, world, channels_last=channels_last)

    def steps(count: int) -> None:
        if world.rank == 0:
            threads = torch.get_num_threads()
            torch.set_num_threads(len(os.sched_getaffinity(0)))
            for _ in range(count):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            torch.set_num_threads(threads)

    return steps


def random_batch(size: int, world: World, *, channels_last: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images (size, 3, 32, 32) and labels (size,) on the device."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.randn(size, 3, 32, 32, device=world.device).to(memory_format=layout)
    return images, torch.randint(0, 10, (size,), device=world.device)


class WithoutSaves(Control):
    """All that comes between two steps, but for checkpoints."""

    def end_of_epoch(self, position: Position) -> None:
        """Save nothing."""
        self._engine.pool_batchnorm()


class Unwatched(WithoutSaves):
    """No exchange between the ranks, no checks, no requests to stop: the loss alone, averaged on logged steps."""

    def after_step(
        self,
        position: Position,
        info: StepInfo,
        loss: torch.Tensor,
        *,
        last: bool,
        again: Callable[[], tuple[float, list[str]]],
    ) -> None:
        """Record the step."""
        mean = float(loss) if last or position.step % LOG_STEPS == 0 else 0.0
        ended = time.perf_counter()
        self._meter.step(info, mean, epoch=position.epoch, step=position.step, ended=ended, spike=None)

    def at(self, position: Position, doing: str) -> None:
        """Tell nobody."""


class WholeLoop:
    """dsimg's own `loop.fit`, an epoch of `steps` optimizer steps at a time."""

    def __init__(
        self,
        arch: str,
        stage: int,
        world: World,
        split: Split,
        *,
        steps: int,
        folder: Path,
        control: type[Control] = WithoutSaves,
    ) -> None:
        model = models.build_model(arch, num_classes=10, input_size=32)
        self.preprocess = models.default_preprocess("cifar_resnet20", image_size=32)
        self.engine = Engine(
            model,
            config=ds_config(stage, world, model),
            groups=models.parameter_groups(model, 5e-4),
            optimizer=OptimizerSpec(name="sgd"),
            lr=0.01,
            world=world,
        )
        augmentation = Augmentation(name="light", size=(32, 32), geometry="padded_crop")
        images = data.TrainImages(split, self.preprocess, augmentation, seed=0, ram=True)
        plan = StepPlan(samples=len(images), micro=BATCH // world.size, accumulation=1, world=world.size)
        assert plan.steps == steps
        self.loader = data.TrainLoader(images, plan, rank=world.rank, prefetch=world.device.type == "cuda")
        self.file = MetricsFile(folder / "metrics.jsonl", step=0, rank=world.rank)
        self.terminal = Terminal(rank=world.rank, stream=Path(os.devnull).open("w"))  # noqa: SIM115
        self.control_type, self.folder = control, folder
        self.stop = StopWatch(stop_file=None, max_hours=None, at_once=lambda reason, code: None, signals=False)
        self.watch: RankWatch | None = None
        if control is not Unwatched and world.size > 1:
            self.watch = RankWatch(
                rank=world.rank, size=world.size, store=open_store(), timeout=300, on_loss=lambda text: None
            )
        self.saver = Saver(
            folder / "checkpoints", self.engine, keep=2, on_error="stop", saved_step=0, terminal=self.terminal
        )
        self.steps = steps
        self.epoch = 0
        self.world = world

    def close(self) -> None:
        """End the threads."""
        self.stop.close()
        if self.watch is not None:
            self.watch.close()

    def __call__(self, count: int) -> None:
        """Take `count` steps: whole epochs."""
        epochs = count // self.steps
        start = Position(epoch=self.epoch, step=self.epoch * self.steps)
        meter = Meter(
            self.engine,
            steps_per_epoch=self.steps,
            images_per_epoch=len(self.loader.images),
            batch_size=BATCH,
            epochs=10**6,
            start_step=start.step,
            log_steps=LOG_STEPS,
            file=self.file,
            terminal=self.terminal,
        )
        control = self.control_type(
            self.engine,
            start=start,
            limits=Limits(
                save_minutes=10**6, max_steps=None, max_hours=None, stop_file=None, grace_seconds=30, bad_images=0
            ),
            meter=meter,
            health=Health(self.engine, max_skipped=20),
            saver=self.saver,
            state=lambda position: {},
            count_bad_images=lambda: 0,
            too_many_bad_images=lambda: None,
            divergence_file=self.folder / "divergence.json",
            stop=self.stop,
            watch=self.watch,
            terminal=self.terminal,
        )
        loop.fit(
            self.engine,
            loader=self.loader,
            preprocess=self.preprocess,
            loss=lambda output, _, targets: cross_entropy(output, targets.labels, label_smoothing=0.0),
            schedule=None,
            seed=0,
            mixup=0.0,
            cutmix=0.0,
            start=start,
            epochs=self.epoch + epochs,
            meter=meter,
            control=control,
            evaluate=lambda position: None,
        )
        self.epoch += epochs


def seconds(work: Callable[[int], None], steps: int, world: World) -> float:
    """Return the time that `steps` steps take, all ranks together."""
    world.barrier()
    begun = time.perf_counter()
    work(steps)
    world.barrier()
    return time.perf_counter() - begun


def first_images(split: Split, count: int) -> Split:
    """Return `count` images spread over the classes."""
    chosen = np.linspace(0, len(split.files) - 1, count).astype(int)
    return Split(split.folder, tuple(split.files[index] for index in chosen), split.labels[chosen])


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line for each model and stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int)
    options = parser.parse_args(argv)
    world = start_world()
    split = first_images(find_images(options.data, seed=0).train, options.steps * BATCH)
    say = print if world.rank == 0 else lambda *_, **__: None
    say(f"batch {BATCH}, {world.size} ranks, {world.device.type}, {options.rounds} rounds of {options.steps} steps")
    say("model            stage  dsimg images/s  / bare DeepSpeed (min-max)   / best bare PyTorch   data wait")
    for arch in options.model or ["cifar_resnet20", "resnet18"]:
        torch_loops = [bare_torch(arch, world, channels_last=layout) for layout in (False, True)]
        for stage in STAGES:
            with tempfile.TemporaryDirectory() as folder:
                whole = WholeLoop(arch, stage, world, split, steps=options.steps, folder=Path(folder))
                contestants: list[Callable[[int], None]] = [whole, bare_deepspeed(arch, stage, world), *torch_loops]
                for contestant in contestants:
                    contestant(options.steps)  # warm-up
                rounds = [
                    [seconds(contestant, options.steps, world) for contestant in contestants]
                    for _ in range(options.rounds)
                ]
                whole.close()
                waits = data_waits(Path(folder) / "metrics.jsonl")
            ratios = [row[1] / row[0] for row in rounds]
            to_torch = statistics.median(min(row[2:]) / row[0] for row in rounds)
            rate = options.steps * BATCH / statistics.median(row[0] for row in rounds)
            say(
                f"{arch:<16} {stage:>5}  {rate:>14.0f}  {statistics.median(ratios):>8.2f} ({min(ratios):.2f}-"
                f"{max(ratios):.2f}) {to_torch:>22.2f}  {statistics.median(waits) if waits else float('nan'):>10.1%}",
                flush=True,
            )
    world.barrier()
    os._exit(0)


def data_waits(path: Path) -> list[float]:
    """Return the share of time that each logged step waited for data (on rank 0)."""
    if not path.exists():
        return []
    return [json.loads(line)["data_wait"] for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
