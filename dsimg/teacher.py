"""The networks that teach: what they say of the very images that the student sees."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsimg import models
from dsimg.cache import free_memory
from dsimg.console import bytes_text, count_text
from dsimg.errors import ConfigError, ModelError
from dsimg.forward import inference_forward
from dsimg.preprocess import Preprocess
from dsimg.recipe import Teaching
from dsimg.run import Run
from dsimg.weights import load_weights, open_network
from dsimg.world import World, bf16_is_fast

EVENTS = 256  # pairs of CUDA events kept before they are read; the first of them are long past by then
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Member:
    """One network that teaches."""

    name: str  # as the user gave it
    arch: str
    model: nn.Module
    preprocess: Preprocess
    order: tuple[int, ...]  # which of its logits is each class of the student's


def open_member(source: str, *, classes: Sequence[str], student: Preprocess, flag: str = "--source") -> Member:
    """Find what `source` names: a run folder, weights of torchvision's (ResNet50_Weights.DEFAULT), or
    package.module:function, which returns a trained network for images normalised as the student's.

    Raises RunError, ModelError, and ConfigError where its classes are not the student's.
    """
    path = Path(source)
    if path.is_dir():
        run = Run.open(path)
        block = run.model
        order = order_of(block["classes"], classes, flag=f"{flag} {source}")
        return Member(source, block["arch"], open_network(run), Preprocess.from_dict(block["preprocess"]), order)
    every = tuple(range(len(classes)))
    if ":" in source:
        model = models.build_model(source, num_classes=len(classes))
        models.check_input_size(model, student.input_size[1], source, num_classes=len(classes))
        return Member(source, source, model, student, every)
    if "_Weights." in source:
        arch, _ = models.arch_of_weights(source)
        preprocess = models.default_preprocess(arch, image_size=None, weights=source)
        model = models.build_model(arch, num_classes=len(classes), input_size=preprocess.input_size[1])
        report = load_weights(model, source, arch=arch, classes=classes)
        if not report.head_kept:
            raise ConfigError(
                f"{flag} {source} knows the classes of ImageNet, the data has {len(classes)} others. Train it on the "
                f"data first: dsimg train --model {arch} --weights {source}, and give that run."
            )
        return Member(source, arch, model, preprocess, every)
    raise ModelError(
        f"{flag} {source} is no run folder, no weights of torchvision's such as ResNet50_Weights.DEFAULT, and not "
        "package.module:function."
    )


def order_of(theirs: Sequence[str], ours: Sequence[str], *, flag: str) -> tuple[int, ...]:
    """Return which of another network's logits is each class of ours. Raises ConfigError, naming what differs."""
    if set(theirs) != set(ours):
        missing = [name for name in ours if name not in set(theirs)]
        extra = [name for name in theirs if name not in set(ours)]
        parts = [
            f"{what} {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
            for what, names in (("it does not know", missing), ("it alone knows", extra))
            if names
        ]
        raise ConfigError(
            f"{flag} was trained on other classes than the data has: {'; '.join(parts)}. Give the data it "
            "was trained on, or train it on these images first: dsimg train --weights."
        )
    place = {name: index for index, name in enumerate(theirs)}
    return tuple(place[name] for name in ours)


class Teacher:
    """One network, or several whose probabilities are averaged; always in eval mode, without gradients.

    `logits` takes the student's view, normalised for the student, and hands each network what it expects: its own
    size and normalisation. `seconds` is what that has cost so far on this rank. `digest` is what `digest_of` said of
    the members before their weights were cast and shared out, where there is a cache that asks for it.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        student: Preprocess,
        world: World,
        precision: str,
        sharded: bool,
        digest: str | None = None,
    ) -> None:
        self.members = tuple(members)
        self.digest = digest
        self._student = student
        self._world = world
        self.device = world.device
        self.precision = precision
        self._sharded = sharded
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        config = _sharded_config(precision) if sharded else None
        for member in members:
            member.model.to(DTYPES[precision])  # buffers too, which DeepSpeed would leave: BatchNorm takes no mixture
        self._forwards = [
            inference_forward(member.model, config=config, world=world, dtype=DTYPES[precision]) for member in members
        ]
        for member in members:
            member.model.requires_grad_(False)

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """images: (N, 3, H, W), as the student gets them -> (N, C) float32, in the student's order of classes."""
        began = self._start()
        each = []
        for member, forward in zip(self.members, self._forwards, strict=True):
            output = models.primary_logits(forward(_view(images, self._student, member.preprocess)))
            each.append(output.float()[:, list(member.order)])
        # The mean of probabilities, as logits: one network's stay what they are.
        mean = each[0] if len(each) == 1 else torch.stack([one.log_softmax(1) for one in each]).logsumexp(0)
        self._stop(began)
        return mean

    def agree(self, known: bool) -> bool:
        """Tell whether `logits` need not be called: the ranks of a sharded teacher compute together or not at all."""
        if not self._sharded:
            return known
        missing = self._world.sum(torch.tensor([0.0 if known else 1.0], device=self._world.device))
        return float(missing) == 0

    @property
    def seconds(self) -> float:
        """Seconds of this rank that `logits` has taken so far."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
        self._events.clear()
        return self._seconds

    def _start(self) -> Any:
        if self._world.device.type != "cuda":
            return time.perf_counter()
        return _cuda_event()

    def _stop(self, began: Any) -> None:
        if self._world.device.type != "cuda":
            self._seconds += time.perf_counter() - began
            return
        self._events.append((began, _cuda_event()))
        if len(self._events) >= EVENTS:
            _ = self.seconds


def digest_of(members: Sequence[Member]) -> str:
    """Return a hash of all weights and views, by which a cache knows its teacher; while the weights are whole."""
    total = hashlib.sha256()
    for member in members:
        total.update(repr((member.preprocess, member.order)).encode())
        for name, tensor in member.model.state_dict().items():
            total.update(name.encode())
            total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _cuda_event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _view(images: Tensor, student: Preprocess, teacher: Preprocess) -> Tensor:
    """Return the student's view (N, 3, H, W) as the teacher takes it: another normalisation, another size."""
    if (student.mean, student.std) != (teacher.mean, teacher.std):
        constants = [
            torch.tensor(values, device=images.device).view(3, 1, 1)
            for values in (student.mean, student.std, teacher.mean, teacher.std)
        ]
        mean, std, own_mean, own_std = constants
        images = (images * std + (mean - own_mean)) / own_std
    size = teacher.input_size[1:]
    if tuple(images.shape[2:]) != tuple(size):
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True, align_corners=False)
    return images


def _sharded_config(precision: str) -> dict[str, Any]:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    return config if precision == "fp32" else {**config, precision: {"enabled": True}}


def open_teacher(
    sources: Sequence[str],
    config: Teaching,
    *,
    classes: Sequence[str],
    student: Preprocess,
    world: World,
    flag: str = "--source",
) -> tuple[Teacher, list[tuple[str, str]]]:
    """Open the networks that `sources` name, decide precision and sharding, and return the plan's rows on them. `flag`
    is what the user named them with."""
    members = [open_member(source, classes=classes, student=student, flag=flag) for source in sources]
    precision = config.teacher_precision
    if precision == "auto":
        precision = "bf16" if world.on_rank_zero(lambda: bf16_is_fast(world.device)) else "fp32"
    parameters = sum(models.count_parameters(member.model) for member in members)
    size = parameters * DTYPES[precision].itemsize
    sharded = config.teacher_shard == "yes"
    if config.teacher_shard == "auto":
        sharded = world.size > 1 and world.on_rank_zero(lambda: size > _free_bytes(world) / 2)
    rows = []
    for index, member in enumerate(members):
        side = member.preprocess.input_size[1]
        macs = count_text(models.count_macs(member.model, side))
        text = (
            f"{member.name}: {member.arch}, {count_text(models.count_parameters(member.model))} parameters, {macs} MACs"
        )
        resized = "" if side == student.input_size[1] else f" at {side}x{side}, resized from the student's view"
        rows.append(("teacher" if index == 0 else "", text + resized))
    how = "sharded over the ranks (ZeRO-3)" if sharded else "whole on each rank"
    mean = "; the mean of their probabilities" if len(members) > 1 else ""
    rows.append(("", f"in {precision}, {bytes_text(size)}, {how}{mean}"))
    digest = world.on_rank_zero(lambda: digest_of(members)) if config.cache_teacher is not None else None
    teacher = Teacher(members, student=student, world=world, precision=precision, sharded=sharded, digest=digest)
    return teacher, rows


def _free_bytes(world: World) -> int:
    """Return the memory that the device has left, this rank's share of it on a CPU."""
    if world.device.type == "cuda":
        return int(torch.cuda.mem_get_info(world.device)[0])
    return free_memory() // world.local_size
