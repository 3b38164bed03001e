"""A network of your own for --model: a function that takes `num_classes` and returns a module.

dsimg train --data DIR --model examples.my_model:tiny_net       (where the folder examples/ lies)
dsimg train --data DIR --model my_model:tiny_net                (where this file lies, or with it installed)
"""

from torch import nn


def tiny_net(num_classes: int) -> nn.Module:
    """Return three convolutions and a linear layer: images (N, 3, H, W) of any size -> logits (N, num_classes)."""
    return nn.Sequential(
        *_convolution(3, 16, stride=1),
        *_convolution(16, 32, stride=2),
        *_convolution(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


def _convolution(in_channels: int, channels: int, *, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(channels), nn.ReLU()
