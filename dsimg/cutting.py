"""From a target to the channels that go: what is measured, how many blocks reach it, and what a cut leaves behind."""

import contextlib
import copy
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dsimg import data, losses, models
from dsimg.channels import Indices, Unit
from dsimg.console import ms_text
from dsimg.graph import Found
from dsimg.importance import scores
from dsimg.plan import TrainPlan
from dsimg.pruned import cut
from dsimg.runtime import require_onnxruntime
from dsimg.steps import epoch_order
from dsimg.widths import Block, kept_after, removal_order, search

TOLERANCE = 0.03  # of the target: within it, it counts as reached
LATENCY_CALLS = 10
COARSE_UNITS = 16  # left as they are, at most, where one more of their blocks goes too far
CALIBRATION_IMAGES = 64
GRADIENT_IMAGES = 1024
BATCHNORM_IMAGES = 2048
BATCH = 64

Say = Callable[[str], None]


class Yardstick(Protocol):
    """What a target is said in."""

    cheap: bool  # needs no weights, and takes no time to speak of

    def share(self, model: nn.Module) -> float:
        """Return how much of the source's the network has, 1 for the source itself."""


class Counted:
    """MACs or parameters."""

    cheap = True

    def __init__(self, source: nn.Module, *, what: Literal["macs", "params"], side: int) -> None:
        self._count: Callable[[nn.Module], int] = (
            models.count_parameters if what == "params" else lambda model: models.count_macs(model, side)
        )
        self._whole = self._count(source)

    def share(self, model: nn.Module) -> float:
        """Return the share of the source's count."""
        return self._count(model) / self._whole


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How latency is measured: ONNX Runtime's session on the CPU of this machine."""

    batch: int
    threads: int
    int8: bool

    def __str__(self) -> str:
        return (
            f"{'int8' if self.int8 else 'fp32'}, batch {self.batch}, {self.threads} thread{'s' * (self.threads != 1)}"
        )


class Sessions:
    """ONNX files of several networks, and the latency of their sessions measured in turn."""

    cheap = False

    def __init__(
        self, source: nn.Module, *, serving: Serving, input_size: tuple[int, int, int], calibration: Tensor, say: Say
    ) -> None:
        """`calibration`: (N, 3, H, W) normalised images, for int8. Raises ConfigError without ONNX Runtime."""
        require_onnxruntime("measuring a session")
        import dsimg_export.session

        self._measure = dsimg_export.session.latency
        self.serving, self._input_size, self._say = serving, input_size, say
        self._calibration: list[NDArray[np.float32]] = [part.cpu().numpy() for part in torch.split(calibration, 8)]
        self._folder = tempfile.TemporaryDirectory(prefix="dsimg-")
        self._files: dict[str, dict[bool, Path]] = {}
        self.add("source", source)

    def add(self, name: str, model: nn.Module) -> None:
        """Export a network under a name; one that was there is replaced."""
        from dsimg.to_onnx import to_onnx

        path = Path(self._folder.name) / f"{name}.onnx"
        to_onnx(model, path, input_size=self._input_size)
        self._files[name] = {False: path}

    def close(self) -> None:
        """Remove the files. Without it they go with this object."""
        self._folder.cleanup()

    def file(self, name: str, *, int8: bool) -> Path:
        """Return the ONNX file of a network, quantized where that is asked for."""
        from dsimg_export.int8 import quantize_static_int8

        files = self._files[name]
        if int8 not in files:
            files[True] = files[False].with_name(f"{name}-int8.onnx")
            quantize_static_int8(files[False], files[True], images=self._calibration)
        return files[int8]

    def seconds(self, names: Sequence[str], *, int8: Sequence[bool], duration: float = 2.0) -> dict[str, float]:
        """Return seconds of one run of each network in each precision, as "name fp32" and "name int8"."""
        files = {f"{name} {'int8' if q else 'fp32'}": self.file(name, int8=q) for name in names for q in int8}
        measured = self._measure(
            files,
            input_size=self._input_size,
            batch=self.serving.batch,
            threads=self.serving.threads,
            seconds=duration,
        )
        # Processor time leaves out what else the machine does; with several threads it would leave out waiting too.
        return {name: one.cpu if self.serving.threads == 1 else one.median for name, one in measured.items()}

    def share(self, model: nn.Module) -> float:
        """Return the latency as a share of the source's, both measured in turn."""
        self.add("candidate", model)
        times = self.seconds(("source", "candidate"), int8=(self.serving.int8,))
        precision = "int8" if self.serving.int8 else "fp32"
        seconds = times[f"candidate {precision}"]
        share = seconds / times[f"source {precision}"]
        self._say(f"measured: {ms_text(seconds)}, {share:.3f} of the source's")
        return share


@dataclass(frozen=True)
class Choice:
    """Which channels stay: `kept[i]` of `units[i]`. `share` is what was reached; `shortfall` says why not the goal."""

    units: tuple[Unit, ...]
    kept: list[Indices]
    share: float
    shortfall: str | None

    @property
    def cuts(self) -> bool:
        """Whether anything goes at all."""
        return any(len(kept) < unit.channels for unit, kept in zip(self.units, self.kept, strict=True))


def choose(
    model: nn.Module,
    found: Found,
    *,
    yardstick: Yardstick,
    goal: float,
    importance: str,
    round_to: int,
    max_ratio: float,
    whole: Sequence[float] | None = None,
    gradients: dict[str, Tensor] | None,
    seed: int,
) -> Choice:
    """Choose what to cut so that `yardstick` shows `goal`, a share of the source's. The model, on the CPU, stays as it
    is; `whole` are the channels that each unit had before earlier cuts, which `max_ratio` is a share of."""
    units = found.units
    ranked = scores(model, units, importance=importance, seed=seed, gradients=gradients)
    blocks = removal_order(units, ranked, round_to=round_to, max_ratio=max_ratio, whole=whole)
    original = _light(model, yardstick)

    def left(gone: Sequence[Block]) -> float:
        candidate = copy.deepcopy(original)
        cut(candidate, units, kept_after(units, gone, len(gone)))
        return yardstick.share(candidate)

    if yardstick.cheap:
        gone, share = _nearest(blocks, left, goal=goal)
    else:
        # Half of what counts as reached, since what is measured again will be a little different.
        count, share = search(
            len(blocks),
            lambda count: left(blocks[:count]),
            target=goal,
            tolerance=goal * TOLERANCE / 2,
            max_calls=LATENCY_CALLS,
        )
        gone = blocks[:count]
    shortfall = None
    if abs(share - goal) > goal * TOLERANCE:
        if not blocks:
            shortfall = nothing_goes(units, round_to=round_to, max_ratio=max_ratio)
        elif share > goal and len(gone) == len(blocks):
            shortfall = (
                f"no more can go with --round_to {round_to}, --max_ratio {max_ratio:g} and what is protected or cannot "
                "be cut"
            )
        elif yardstick.cheap:
            shortfall = f"blocks of {round_to} channels are that coarse here: give a smaller --round_to"
            if round_to == 1:
                shortfall = "the next channels that go together are too many, and what else can go is too little"
        else:
            shortfall = f"the session's latency makes steps there, and {LATENCY_CALLS} measurements found none nearer"
    return Choice(units, kept_after(units, gone, len(gone)), share, shortfall)


def nothing_goes(units: Sequence[Unit], *, round_to: int, max_ratio: float) -> str:
    """Return why no block of any unit may go."""
    if all(unit.channels * unit.width <= round_to for unit in units):
        return f"nothing is wider than {round_to} channels (--round_to) that may be cut"
    return f"--max_ratio {max_ratio:g} lets no whole block of {round_to} channels (--round_to) go"


def _light(model: nn.Module, yardstick: Yardstick) -> nn.Module:
    """Return the network without its weights where the yardstick can do without them."""
    if yardstick.cheap:
        light = copy.deepcopy(model).to("meta")
        with contextlib.suppress(Exception):  # a network that reads values: any type
            yardstick.share(light)
            return light
    return model


def _nearest(
    blocks: list[Block], left: Callable[[Sequence[Block]], float], *, goal: float
) -> tuple[list[Block], float]:
    """Return the blocks that go and what they leave, nearest to the goal.

    Where the next block would go too far, such as an attention head with its share of a whole stage, its unit stays as
    it is by then, and the others go on.
    """

    def beyond(start: int, blocks: list[Block]) -> tuple[int, float]:
        count, share = search(len(blocks) - start, lambda more: left(blocks[: start + more]), target=goal)
        return start + count, share

    found: list[tuple[list[Block], float]] = []
    start = 0
    while len(found) < COARSE_UNITS:
        end, share = beyond(start, blocks)
        found.append((blocks[:end], share))
        if abs(share - goal) <= goal * TOLERANCE or (end == len(blocks) if share > goal else end == 0):
            break
        start = end if share > goal else end - 1
        coarse = blocks[start].unit
        blocks = blocks[:start] + [block for block in blocks[start:] if block.unit != coarse]
    return min(found, key=lambda one: abs(one[1] - goal))


# --- What a cut needs of the data -------------------------------------------------------------------------------


def training_batches(
    setup: TrainPlan, count: int, *, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (images (N, 3, H, W) normalised, labels (N,)) on the device: `count` training images as augmented for the
    first epoch, in its order."""
    preprocess, split = setup.network.preprocess, setup.folder.train
    images = data.TrainImages(split, preprocess, setup.augmentation, seed=seed)
    order = epoch_order(len(split.files), seed=seed, epoch=0)[:count]
    # Batches of one size: each counts as much in BatchNorm's average, which one image alone may not even have.
    for ids in np.array_split(order, math.ceil(len(order) / BATCH)):
        pixels, _ = images.batch(ids, epoch=0)
        yield data.to_input(pixels, preprocess, device), torch.from_numpy(split.labels[ids]).to(device)


def mean_gradients(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Return the mean gradient of the cross-entropy over batches of (images (N, 3, H, W), labels (N,)), by name.

    In eval mode, so that BatchNorm's statistics are those the network is used with. The model does not change.
    """
    was_training = model.training
    model.eval().zero_grad(set_to_none=True)
    count = 0
    for images, labels in batches:
        logits = models.primary_logits(model(images))
        losses.cross_entropy(logits, labels, label_smoothing=0.0).sum().backward()  # type: ignore[no-untyped-call]
        count += len(labels)
    gradients = {
        name: (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / max(count, 1)).detach()
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    model.zero_grad(set_to_none=True)
    model.train(was_training)
    return gradients


@torch.no_grad()
def reestimate_batchnorm(model: nn.Module, batches: Iterable[Tensor]) -> int:
    """Measure BatchNorm's running statistics anew on images (N, 3, H, W), and return how many layers that were.

    Channels that are gone have changed what comes after them; the statistics of the wider network no longer hold.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
    if not layers:
        return 0
    momenta = [layer.momentum for layer in layers]
    was_training = model.training
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain average over the batches
        layer.train()
    for images in batches:
        model(images)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    model.train(was_training)
    return len(layers)


def sparsity_penalty(model: nn.Module, units: Sequence[Unit], *, strength: float) -> Callable[[], Tensor]:
    """Return a function that gives the penalty of DepGraph's sparse training (arXiv 2301.12900, equation 4), a scalar.

    The squares of all weights of a channel, times a factor from 1 for the largest channel of its unit to 16 for the
    smallest: small ones are driven to nothing together, in every layer that they run through.
    """
    parameters = dict(model.named_parameters())
    slices = [
        [
            (parameters[part.tensor], part.dim, torch.from_numpy(part.index))
            for part in unit.slices
            if part.tensor in parameters
        ]
        for unit in units
    ]

    indices: dict[int, Tensor] = {}

    def penalty() -> Tensor:
        if not indices:  # not before: the engine moves the network to its device
            device = next(iter(parameters.values())).device
            indices.update({id(index): index.to(device) for unit in slices for _, _, index in unit})
        total: Any = 0.0
        squares: dict[tuple[int, int], Tensor] = {}
        for unit in slices:
            energy: Any = 0.0
            for tensor, dim, index in unit:
                key = (id(tensor), dim)
                if key not in squares:
                    squares[key] = (
                        tensor.float().square().movedim(dim, 0).flatten(1).sum(1)
                        if tensor.dim() > 1
                        else (tensor.float().square())
                    )
                energy = energy + squares[key][indices[id(index)]].sum(1)
            size = energy.detach().sqrt()
            span = (size.max() - size.min()).clamp_min(1e-12)
            factor = 2 ** (4 * (size.max() - size) / span)
            total = total + (factor * energy).sum()
        result: Tensor = strength * total / 2
        return result

    return penalty
