"""The one `fit` and the one `evaluate`. Training, distilling and fine-tuning differ in the loss they pass."""

import csv
import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsimg import augment, data, metrics
from dsimg.engine import Engine
from dsimg.errors import DataError
from dsimg.folder import Split
from dsimg.losses import cross_entropy
from dsimg.meter import Meter
from dsimg.models import primary_logits
from dsimg.preprocess import Preprocess
from dsimg.run import write_atomically, write_json
from dsimg.schedule import Schedule
from dsimg.world import World


@dataclass(frozen=True)
class Targets:
    """What a batch (N,) should be classified as; mixed images are `lam` (N,) of `labels`, the rest of `partners`."""

    labels: Tensor
    partners: Tensor | None
    lam: Tensor | None


# (the network's output, the images it saw (N, 3, H, W), the targets) -> the loss of each sample (N,)
Loss = Callable[[Any, Tensor, Targets], Tensor]


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
    start_epoch: int,
    epochs: int,
    bad_image_limit: int,
    meter: Meter,
    too_many_bad_images: Callable[[], None],
    end_of_epoch: Callable[[int, int], None],
) -> None:
    """Train from `start_epoch` to `epochs`; call `end_of_epoch(epochs done, steps done)` after each.

    `schedule` None leaves the learning rate to the DeepSpeed JSON's scheduler. `too_many_bad_images` is called on all
    ranks as soon as they may know of more than `bad_image_limit` training images that cannot be decoded; it counts
    exactly and raises.
    """
    device = engine.world.device
    step = start_epoch * loader.steps_per_epoch
    for epoch in range(start_epoch, epochs):
        engine.train()
        # Dropout and stochastic depth: a stream for each epoch and rank, so that a resumed run draws the same.
        torch.manual_seed(hash((seed, epoch, engine.world.rank)) % 2**63)
        batches = iter(loader.epoch(epoch))
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            meter.waited(time.perf_counter() - asked)
            if batch is None:
                break
            images = data.to_input(batch.images, preprocess, device)
            targets = Targets(batch.labels.to(device, non_blocking=True), None, None)
            if mixup > 0 or cutmix > 0:
                images, partners, lam = augment.mix(
                    images,
                    targets.labels,
                    batch.ids,
                    batch.partner,
                    seed=seed,
                    epoch=epoch,
                    mixup=mixup,
                    cutmix=cutmix,
                )
                targets = Targets(targets.labels, partners, lam)
            losses = loss(engine.forward(images), images, targets)
            weighted = (losses * batch.weights.to(device, non_blocking=True)).sum()
            engine.backward(weighted, boundary=batch.boundary)
            meter.micro_batch(weighted)
            if batch.boundary:
                info = engine.step(lr=schedule.at(step) if schedule else None)
                step += 1
                # In RAM, every rank knows them all and they were counted before.
                found = 0 if loader.images.in_ram else len(loader.bad)
                bad = meter.step(info, epoch=epoch, step=step, bad_images=found)
                if bad is not None and bad > bad_image_limit:
                    too_many_bad_images()
        paused = time.perf_counter()
        end_of_epoch(epoch + 1, step)
        meter.pause(time.perf_counter() - paused)


@dataclass(frozen=True)
class Evaluation:
    """A report (see `metrics.evaluation_report`) and what it was made from, in the split's order. On rank 0 only."""

    report: dict[str, Any]
    split: Split
    top: np.ndarray  # (N, min(5, C)) class ids, best first
    probability: np.ndarray  # (N,) of the best class
    losses: np.ndarray  # (N,)


@torch.no_grad()
def evaluate(
    forward: Callable[[Tensor], Any],
    *,
    world: World,
    batches: Iterable[data.EvalBatch],
    split: Split,
    preprocess: Preprocess,
    classes: Sequence[str],
) -> Evaluation | None:
    """Measure a network on a split, each image once on any number of ranks. All take part; rank 0 gets the result.

    `forward` maps normalised images (N, 3, H, W) to outputs in fp32; every rank calls it equally often, since the ranks
    of ZeRO-3 work in step. Files that cannot be decoded are counted and left out of the figures.
    """
    rows: list[np.ndarray] = []
    bad: dict[str, str] = {}
    width = min(metrics.TOP, len(classes))
    for batch in batches:
        logits = primary_logits(forward(data.to_input(batch.images, preprocess, world.device)))
        labels = batch.labels.to(world.device)
        losses = cross_entropy(logits, labels, label_smoothing=0.0)
        keep = batch.valid.numpy()
        numbers = logits.double().cpu().numpy()
        top = metrics.top_k(numbers, width)
        best = logits.double().softmax(1).amax(1).cpu().numpy()
        row = np.column_stack([batch.ids, losses.double().cpu().numpy(), best, top])
        rows.append(row[keep])
        bad.update(batch.bad)
    gathered = world.gather((np.concatenate(rows) if rows else np.empty((0, 3 + width)), bad))
    if world.rank != 0:
        return None
    table = np.concatenate([part for part, _ in gathered])
    table = table[np.argsort(table[:, 0], kind="stable")]
    unreadable = {file: reason for _, part in gathered for file, reason in part.items()}
    ids = table[:, 0].astype(np.int64)
    if len(ids) + len(unreadable) != len(split.files) or len(np.unique(ids)) != len(ids):
        raise AssertionError(f"evaluated {len(ids)} + {len(unreadable)} unreadable of {len(split.files)} images")
    if not len(ids):
        raise DataError(
            f"none of the {len(split.files)} images in {split.folder} can be decoded: there is nothing to evaluate."
        )
    top = table[:, 3:].astype(np.int64)
    report = metrics.evaluation_report(labels=split.labels[ids], top=top, losses=table[:, 1], classes=classes)
    report["bad_images"] = [{"file": file, "reason": reason} for file, reason in sorted(unreadable.items())]
    good = Split(split.folder, tuple(split.files[i] for i in ids), split.labels[ids])
    return Evaluation(report, good, top, table[:, 2], table[:, 1])


def write_evaluation(folder: Path, evaluation: Evaluation, classes: Sequence[str]) -> None:
    """Write `evaluation.json` and `predictions.csv` (a line per image) into a folder."""
    write_json(folder / "evaluation.json", evaluation.report)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    width = evaluation.top.shape[1]
    writer.writerow(
        [
            "file",
            "label",
            "predicted",
            "correct",
            "probability",
            "loss",
            *(f"top{k + 1}" for k in range(width)),
        ]
    )
    for file, label, top, probability, loss in zip(
        evaluation.split.files,
        evaluation.split.labels,
        evaluation.top,
        evaluation.probability,
        evaluation.losses,
        strict=True,
    ):
        names = ["" if k == metrics.NO_CLASS else classes[k] for k in top]
        writer.writerow(
            [
                file,
                classes[label],
                names[0],
                int(top[0] == label),
                f"{probability:.6f}",
                f"{loss:.6f}",
                *names,
            ]
        )
    write_atomically(folder / "predictions.csv", text.getvalue().encode("utf-8", "surrogateescape"))


def result_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the result table: accuracy with its 95 % interval, loss, images."""

    def accuracy(entry: dict[str, Any]) -> str:
        low, high = entry["interval"]
        return f"{entry['value']:.2%}  (95 % interval {low:.2%} to {high:.2%})"

    rows = [("images", f"{report['images']}, {report['correct']} right"), ("Top-1", accuracy(report["top1"]))]
    if report["top5"] is not None:
        rows.append(("Top-5", accuracy(report["top5"])))
    rows.append(("loss", "not finite" if report["loss"] is None else f"{report['loss']:.4f}"))
    if report["not_finite"]:
        rows.append(("no prediction", f"{report['not_finite']} images gave NaN or infinity; counted as wrong"))
    if report["bad_images"]:
        names = ", ".join(entry["file"] for entry in report["bad_images"][:3])
        rows.append(("unreadable", f"{len(report['bad_images'])} images left out: {names}"))
    return rows
