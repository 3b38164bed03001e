"""What a student learns from a teacher: the loss, the answers that are kept, the features that are compared."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from dsimg import loop, losses, models
from dsimg.console import bytes_text
from dsimg.evaluation import Evaluation
from dsimg.hints import Hints
from dsimg.metrics import mcnemar
from dsimg.plan import Network, TrainPlan
from dsimg.recipe import TaughtRecipe, Teaching
from dsimg.teacher import Teacher
from dsimg.teacher_cache import TeacherCache, prepare_cache
from dsimg.world import World

# arXiv 1503.02531, 2203.08679, 2205.10536, and 1412.6550 as mdistiller runs it.
TEMPERATURE = {"kd": 4.0, "dkd": 4.0, "dist": 1.0, "hint": 1.0}
ALPHA = {"kd": 0.9, "dkd": 1.0, "dist": 2.0, "hint": 100.0}
DKD_BETA = 2.0  # its authors choose it for each pair of networks, between 0.5 and 8


def loss_text(config: Teaching) -> str:
    """Return the loss in words and numbers: what the true labels count, and what the teacher."""
    alpha, temperature = alpha_of(config), temperature_of(config)
    labels = f"{1 - alpha:g} x " if config.loss == "kd" else ""
    what = {
        "kd": f"{alpha:g} x T² KL(teacher, student)",
        "dkd": f"{alpha:g} x T² (TCKD + {DKD_BETA:g} NCKD)",
        "dist": f"{alpha:g} x T² (inter + intra)",
        "hint": f"{alpha:g} x the features' mean squared difference",
    }[config.loss]
    return f"{config.loss}: {labels}cross-entropy with the true labels + {what}" + (
        f", T = {temperature:g}" if config.loss != "hint" else ""
    )


def alpha_of(config: Teaching) -> float:
    """Return the weight of the teacher's term."""
    return ALPHA[config.loss] if config.alpha is None else config.alpha


def temperature_of(config: Teaching) -> float:
    """Return the temperature of the teacher's term."""
    return TEMPERATURE[config.loss] if config.temperature is None else config.temperature


def distillation_loss(
    teacher: Teacher,
    config: Teaching,
    *,
    label_smoothing: float,
    cache: TeacherCache | None = None,
    hints: Hints | None = None,
) -> loop.Loss:
    """Return the student's loss: cross-entropy with the true labels and what `config.loss` asks of the teacher."""
    on_labels = loop.classification_loss(label_smoothing)
    alpha, temperature = alpha_of(config), temperature_of(config)

    def of_teacher(images: Tensor, targets: loop.Targets) -> Tensor:
        if cache is None:
            return teacher.logits(images)
        # What only fills the batch up is not mixed as that sample is elsewhere: it is not kept.
        real = targets.weights.cpu().numpy() > 0
        known = cache.read(targets.epoch, targets.ids)
        if teacher.agree(known is not None) and known is not None:
            cache.replayed += int(real.sum())
            return known.to(images.device)
        return cache.write(targets.epoch, targets.ids, teacher.logits(images), keep=real).to(images.device)

    def loss(output: Any, images: Tensor, targets: loop.Targets) -> Tensor:
        labels_part = on_labels(output, images, targets)
        logits = models.primary_logits(output)
        said = of_teacher(images, targets)
        if config.loss == "kd":
            part = losses.kd(logits, said, temperature=temperature)
            return (1 - alpha) * labels_part + alpha * part
        if config.loss == "dkd":
            part = losses.dkd(logits, said, targets.labels, temperature=temperature, beta=DKD_BETA)
        elif config.loss == "dist":
            part = losses.dist(logits, said, temperature=temperature, weights=targets.weights)
        else:
            assert hints is not None
            part = hints.difference()
        return labels_part + alpha * part

    return loss


def open_cache(config: TaughtRecipe, setup: TrainPlan, teacher: Teacher, world: World) -> TeacherCache | None:
    """Open --cache_teacher for the views of this run, and say in the plan what it will take. Raises RunError."""
    if config.cache_teacher is None:
        return None
    folder = config.cache_teacher
    augmentation = setup.augmentation
    mixes = config.mixup > 0 or config.cutmix > 0
    key = {
        "teacher": teacher.digest,
        "teacher precision": teacher.precision,
        "seed": config.seed,
        "augmentation": {**dataclasses.asdict(augmentation), "size": list(augmentation.size)},
        "mixup and cutmix": [config.mixup, config.cutmix],
        # Whom an image is mixed with depends on how a batch is dealt out.
        "batch": dataclasses.asdict(setup.plan) if mixes else None,
        "preprocess": setup.network.preprocess.as_dict(),
        "images": setup.folder.train.digest(),
        "classes": list(setup.folder.classes),
    }
    world.on_rank_zero(lambda: prepare_cache(folder, key))
    cache = TeacherCache(folder, samples=len(setup.folder.train.files), classes=len(setup.folder.classes))
    setup.rows[-1:-1] = [("teacher's cache", f"{folder}, {bytes_text(cache.bytes_of(config.epochs))} when complete")]
    return cache


def open_hints(config: TaughtRecipe, student: Network, teacher: Teacher) -> Hints | None:
    """Add to the student what --loss hint needs, or return None. Raises ConfigError."""
    if not config.hint_layers:
        return None
    return Hints(
        student.model,
        teacher.members[0].model,
        config.hint_layers,
        size=student.preprocess.input_size[1],
        ask_teacher=lambda images: teacher.logits(images.to(teacher.device)),
    )


def check_hints(config: TaughtRecipe, student: Network, teacher: Teacher) -> None:
    """Raise ConfigError where --hint_layers do not fit, before anything is begun; the student stays as it is."""
    hints = open_hints(config, dataclasses.replace(student, model=copy.deepcopy(student.model)), teacher)
    if hints is not None:
        hints.close()


# --- What both said of the validation images --------------------------------------------------------------------


def predictions(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation's accuracy and classes for each image, as JSON, to be compared with another network's."""
    return {
        "top1": evaluation.report["top1"],
        "images": evaluation.split.digest(),
        "predicted": evaluation.top[:, 0].tolist(),
    }


def compare_predictions(evaluation: Evaluation, other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return McNemar's test against what `predictions` kept of another network, and how often both say the same; None
    where the readable images are others by now."""
    if other["images"] != evaluation.split.digest():
        return None
    said, theirs, labels = evaluation.top[:, 0], np.array(other["predicted"]), evaluation.split.labels
    return {**mcnemar(said == labels, theirs == labels), "agreement": float((said == theirs).mean())}
