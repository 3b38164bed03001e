"""Networks for tests: a user's own, small enough to train in a moment."""

import os

import torch
from torch import Tensor, nn


class Tiny(nn.Sequential):
    """Two convolutions and a linear layer, with or without BatchNorm, for 32 x 32 images."""

    def __init__(self, *, num_classes: int, norm: bool) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=4, padding=1),
            nn.BatchNorm2d(8) if norm else nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=4, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 2 * 2, num_classes),
        )


def with_batchnorm(num_classes: int) -> nn.Module:
    """A network whose running statistics matter."""
    return Tiny(num_classes=num_classes, norm=True)


def with_dropout(num_classes: int) -> nn.Module:
    """A network that draws random numbers in training."""
    return nn.Sequential(nn.Dropout(0.5), Tiny(num_classes=num_classes, norm=True))


def without_batchnorm(num_classes: int) -> nn.Module:
    """A network whose loss does not depend on how a batch is split."""
    return Tiny(num_classes=num_classes, norm=False)


class Counting(nn.Module):
    """A network that counts its training forwards, for others to go wrong in one."""

    def __init__(self, num_classes: int, *, norm: bool = True) -> None:
        super().__init__()
        self.body = Tiny(num_classes=num_classes, norm=norm)
        self.forwards = 0

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, 32, 32) -> logits (N, num_classes)."""
        self.forwards += self.training and images.device.type != "meta"
        logits: Tensor = self.body(images)
        return logits


class Poisoned(Counting):
    """A network that gives NaN on its third training forward."""

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, 32, 32) -> logits (N, num_classes)."""
        logits = super().forward(images)
        return logits * float("nan") if self.training and self.forwards == 3 else logits


def frozen(num_classes: int) -> nn.Module:
    """A network with nothing to train."""
    return Tiny(num_classes=num_classes, norm=True).requires_grad_(False)


class Scalar(nn.Module):
    """A network with a temperature that has no dimension, as CLIP's."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = Tiny(num_classes=num_classes, norm=True)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, 32, 32) -> logits (N, num_classes)."""
        logits: Tensor = self.body(images) * self.temperature
        return logits


scalar = Scalar


class Extra(Tiny):
    """A network with state that is not a tensor."""

    def get_extra_state(self) -> dict[str, int]:
        """What no run can hold."""
        return {"epoch": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take it back."""


def extra(num_classes: int) -> nn.Module:
    """A network with state that is not a tensor."""
    return Extra(num_classes=num_classes, norm=True)


def leaves(num_classes: int) -> nn.Module:
    """A file that ends the process, as scripts that parse arguments do."""
    raise SystemExit


class Aliased(nn.Module):
    """A network whose BatchNorm layer has two names."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = Tiny(num_classes=num_classes, norm=True)
        self.norm = self.body[1]

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, 32, 32) -> logits (N, num_classes)."""
        logits: Tensor = self.body(images)
        return logits


aliased = Aliased


class Lost(Counting):
    """A network whose last layer gives infinity on rank 1, or on a single rank, from its fourth training forward on."""

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, 32, 32) -> logits (N, num_classes)."""
        logits = super().forward(images)
        here = os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
        return logits * float("inf") if self.training and here and self.forwards >= 4 else logits


class Drifting(Counting):
    """A network that changes a weight of its own on rank 1 after its third training forward."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes, norm=False)

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, 32, 32) -> logits (N, num_classes)."""
        logits = super().forward(images)
        if self.training and self.forwards == 3 and os.environ["RANK"] == "1":
            with torch.no_grad():
                self.body[3].weight.data.view(-1)[5] += 1e-6
        return logits


def wide(num_classes: int) -> nn.Module:
    """A network of 23 thousand parameters, whose checkpoints with Adam's moments take some room."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 120), nn.ReLU(), nn.Linear(120, num_classes))
