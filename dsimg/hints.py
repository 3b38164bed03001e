"""Features of named layers of student and teacher, and the learned 1x1 convolutions between them (FitNets)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from dsimg import losses
from dsimg.errors import ConfigError, near
from dsimg.models import dry_forward
from dsimg.shards import ADAPTERS

Hook = Callable[[nn.Module, Any, Any], None]


class Adapters(nn.ModuleDict):
    """Convolutions by number. A student that is an nn.Sequential runs through all its children, this one too."""

    def forward(self, output: Tensor) -> Tensor:
        """Return what it was given."""
        return output


class Hints:
    """Catches the features of both networks; the student's go through adapters, which are trained with it."""

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        pairs: Sequence[str],
        *,
        size: int,
        ask_teacher: Callable[[Tensor], object],
    ) -> None:
        """`pairs`: "LAYER" or "STUDENT_LAYER:TEACHER_LAYER", modules that give feature maps (N, C, H, W); `size`: the
        side of the student's input; `ask_teacher` runs the teacher, whose weights may be anywhere, on the student's
        images. Adds the adapters to `student`.

        Raises ConfigError: no such layer, or one that gives something else.
        """
        shape = (2, 3, size, size)

        def ask_student() -> object:
            return dry_forward(student, shape, device=None, training=False)

        self._hooks: list[RemovableHandle] = []
        self._said: dict[str, Tensor] = {}
        self._taught: dict[str, Tensor] = {}
        adapters = Adapters()
        for index, pair in enumerate(pairs):
            key = str(index)
            mine, _, theirs = pair.partition(":")
            theirs = theirs or mine
            width = _width(student, mine, ask_student, whose="student")
            taught = _width(teacher, theirs, lambda: ask_teacher(torch.zeros(shape)), whose="teacher")
            with torch.random.fork_rng(devices=[]):  # the same adapters after a stop as before it
                torch.manual_seed(index)
                adapters[key] = nn.Conv2d(width, taught, 1)
            self._hooks += [
                student.get_submodule(mine).register_forward_hook(self._catch_said(key, adapters[key])),
                teacher.get_submodule(theirs).register_forward_hook(self._catch_taught(key)),
            ]
        student.add_module(ADAPTERS, adapters)

    def close(self) -> None:
        """Take the hooks out of both networks."""
        for hook in self._hooks:
            hook.remove()

    def difference(self) -> Tensor:
        """Return the mean squared difference (N,) of the last features of both, over the layers; the larger map of two
        is averaged down to the smaller."""
        total: list[Tensor] = []
        for key, said in self._said.items():
            taught = self._taught[key]
            height, width = (min(sides) for sides in zip(said.shape[2:], taught.shape[2:], strict=True))
            mine, theirs = (F.adaptive_avg_pool2d(one.float(), (height, width)) for one in (said, taught))
            total.append(losses.hint(mine, theirs))
        return torch.stack(total).mean(0)

    def _catch_said(self, key: str, adapter: nn.Module) -> Hook:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if module.training:  # within the student's forward, where ZeRO-3 gathers the adapter's weights as any other
                self._said[key] = adapter(output)

        return hook

    def _catch_taught(self, key: str) -> Hook:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._taught[key] = output.detach()

        return hook


def _width(model: nn.Module, layer: str, forward: Callable[[], object], *, whose: str) -> int:
    """Return the channels of a layer's feature map in a forward of the model. Raises ConfigError."""
    modules = dict(model.named_modules())
    if layer not in modules or not layer:
        raise ConfigError(
            f"--hint_layers: the {whose} has no layer '{layer}'{near(layer, modules)} Its parts are "
            f"{', '.join(name for name, _ in model.named_children())}."
        )
    shapes: list[Any] = []
    handle = modules[layer].register_forward_hook(
        lambda module, args, output: shapes.append(getattr(output, "shape", None))
    )
    try:
        forward()
    finally:
        handle.remove()
    if not shapes or shapes[-1] is None or len(shapes[-1]) != 4:
        given = tuple(shapes[-1]) if shapes and shapes[-1] is not None else "no tensor"
        raise ConfigError(
            f"--hint_layers: '{layer}' of the {whose} gives {given}, not a feature map (N, C, H, W). Name a block of "
            "convolutions, or use --loss dist, which needs no features."
        )
    return int(shapes[-1][1])
