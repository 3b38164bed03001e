"""Networks for tests: a user's own, small enough to train in a moment."""

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


class Poisoned(nn.Module):
    """A network that gives NaN on its third training forward."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = Tiny(num_classes=num_classes, norm=True)
        self.forwards = 0

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, 32, 32) -> logits (N, num_classes)."""
        self.forwards += self.training and images.device.type != "meta"
        logits: Tensor = self.body(images)
        return logits * float("nan") if self.training and self.forwards == 3 else logits
