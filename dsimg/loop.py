"""The one `fit` and the one `evaluate`. Training, distilling and fine-tuning differ in the loss they pass."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsimg import augment, data, evaluation
from dsimg.control import Control, Position
from dsimg.engine import Engine
from dsimg.evaluation import Evaluation
from dsimg.folder import Split
from dsimg.losses import cross_entropy, mixed_cross_entropy
from dsimg.meter import Meter
from dsimg.models import primary_logits, split_outputs
from dsimg.preprocess import Preprocess
from dsimg.schedule import Schedule
from dsimg.watch import TRAINING
from dsimg.world import World


@dataclass(frozen=True)
class Targets:
    """What a batch (N,) should be classified as, and which views of which samples it holds.

    Mixed images are `lam` (N,) of `labels`, the rest of `partners`. A view is a function of (seed, epoch, sample).
    """

    labels: Tensor
    partners: Tensor | None
    lam: Tensor | None
    weights: Tensor  # (N,) 0 for what only fills the batch up
    ids: NDArray[np.int64]  # (N,) samples
    epoch: int


# (the network's output, the images it saw (N, 3, H, W), the targets) -> the loss of each sample (N,)
Loss = Callable[[Any, Tensor, Targets], Tensor]


def classification_loss(label_smoothing: float) -> Loss:
    """Return cross-entropy over the network's logits, and its auxiliary logits where it has them."""

    def loss(output: Any, images: Tensor, targets: Targets) -> Tensor:
        def one(logits: Tensor) -> Tensor:
            if targets.partners is None or targets.lam is None:
                return cross_entropy(logits, targets.labels, label_smoothing=label_smoothing)
            return mixed_cross_entropy(
                logits, targets.labels, targets.partners, targets.lam, label_smoothing=label_smoothing
            )

        logits, auxiliary = split_outputs(output)
        total = one(logits)
        for logits, weight in auxiliary:
            total = total + weight * one(logits)
        return total

    return loss


def fit(
    engine: Engine,
    *,
    loader: data.TrainLoader,
    preprocess: Preprocess,
    loss: Loss,
    schedule: Schedule | None,
    seed: int,
    mixup: float,
    cutmix: float,
    start: Position,
    epochs: int,
    meter: Meter,
    control: Control,
    evaluate: Callable[[Position], None],
) -> None:
    """Train from `start` to `epochs`; `control` comes after each optimizer step, `evaluate` after each epoch.

    A run that starts at an epoch's end is evaluated first: it may have been stopped before. `schedule` None leaves the
    learning rate to the DeepSpeed JSON's scheduler.
    """
    device = engine.world.device

    def backward(batch: data.Batch, epoch: int) -> Tensor:
        """Run one micro-batch forward and backward; return its weighted loss, a scalar on the device."""
        images = data.to_input(batch.images, preprocess, device)
        labels, partners, lam = batch.labels.to(device, non_blocking=True), None, None
        if mixup > 0 or cutmix > 0:
            images, partners, lam = augment.mix(
                images,
                labels,
                batch.ids,
                batch.partner,
                seed=seed,
                epoch=epoch,
                mixup=mixup,
                cutmix=cutmix,
            )
        weights = batch.weights.to(device, non_blocking=True)
        targets = Targets(labels, partners, lam, weights, batch.ids, epoch)
        losses = loss(engine.forward(images), images, targets)
        weighted = (losses * weights).sum()
        # Times 1, or NaN where it is not finite: then no gradient is, and the step is skipped on every rank.
        engine.backward(weighted * (1 + 0 * weighted.detach()), boundary=batch.boundary)
        return weighted.detach()

    position = start
    if position.step and not position.epoch_step:
        evaluate(position)
    for epoch in range(start.epoch, epochs):
        engine.train()
        control.begin_epoch()
        batches = iter(loader.epoch(epoch, start_step=position.epoch_step))
        step_batches: list[data.Batch] = []
        losses: list[Tensor] = []
        _seed_random(seed, position.step, engine.world.rank)
        while True:
            control.at(position, TRAINING)
            asked = time.perf_counter()
            batch = next(batches, None)
            meter.waited(time.perf_counter() - asked)
            if batch is None:
                break
            control.at(position, TRAINING)
            step_batches.append(batch)
            losses.append(backward(batch, epoch))
            if not batch.boundary:
                continue
            info = engine.step(lr=schedule.at(position.step) if schedule else None)
            position = Position(epoch=epoch, epoch_step=position.epoch_step + 1, step=position.step + 1)

            def again(batches: list[data.Batch] = step_batches, epoch: int = epoch) -> tuple[float, list[str]]:
                """Repeat the step's backward passes; return this rank's loss and the images that were in them."""
                total = sum(float(backward(batch, epoch)) for batch in batches)
                return total, [loader.images.file(index) for batch in batches for index in batch.ids.tolist()]

            last = position.epoch_step == loader.steps_per_epoch
            control.after_step(position, info, torch.stack(losses).sum(), last=last, again=again)
            step_batches, losses = [], []
            _seed_random(seed, position.step, engine.world.rank)
        position = Position(epoch=epoch + 1, step=position.step)
        control.end_of_epoch(position)
        evaluate(position)
    control.end(position)


def _seed_random(seed: int, step: int, rank: int) -> None:
    """Make dropout, stochastic depth and whatever a network draws in a step a function of (seed, step, rank), so that a
    run that was stopped anywhere draws what it would have drawn."""
    mixed = hash((seed, step, rank)) % 2**63
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)


@torch.no_grad()
def evaluate(
    forward: Callable[[Tensor], Any],
    *,
    world: World,
    batches: Iterable[data.EvalBatch],
    split: Split,
    preprocess: Preprocess,
    classes: Sequence[str],
    between: Callable[[], None] = lambda: None,
) -> Evaluation | None:
    """Measure a network on a split, each image once on any number of ranks. All take part; rank 0 gets the result.

    `forward` maps normalised images (N, 3, H, W) to outputs in fp32; every rank calls it equally often, since the ranks
    of ZeRO-3 work in step, and `between` before each batch. Files that cannot be decoded are counted and left out of
    the figures.
    """
    rows: list[NDArray[np.float64]] = []
    bad: dict[str, str] = {}
    for batch in batches:
        between()
        logits = primary_logits(forward(data.to_input(batch.images, preprocess, world.device)))
        found = evaluation.measure(logits.double().cpu().numpy(), batch.labels.numpy(), batch.ids)
        rows.append(found[batch.valid.numpy()])
        bad.update(batch.bad)
    gathered = world.gather((rows, bad))
    if world.rank != 0:
        return None
    unreadable = {file: reason for _, part in gathered for file, reason in part.items()}
    return evaluation.gather([row for part, _ in gathered for row in part], unreadable, split=split, classes=classes)
