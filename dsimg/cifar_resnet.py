"""ResNets for 32x32 images (He et al. 2015, arXiv 1512.03385, section 4.2), depths 20, 32, 44, 56 and 110.

A 3x3 convolution to 16 channels, three stages of n blocks at 16, 32 and 64 channels (depth = 6n + 2), global
average pooling and one linear layer. Shortcuts are the paper's option A: where the width grows, every second
pixel is taken and zero channels are appended, so no shortcut has parameters.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DEPTHS = (20, 32, 44, 56, 110)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut: (N, in_channels, H, W) -> (N, channels, H/stride, W/stride)."""

    def __init__(self, in_channels: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride] if self.stride > 1 else x
        # Widths are read from the tensors, so that a narrowed block still pads by the right number of
        # channels.
        missing = out.shape[1] - shortcut.shape[1]
        if missing > 0:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, 0, missing))
        return F.relu(out + shortcut)


class CifarResNet(nn.Module):
    """`depth` is one of DEPTHS. images: (N, 3, H, W), 32x32 in the paper, any size works -> logits (N, C)."""

    def __init__(self, depth: int, *, num_classes: int) -> None:
        super().__init__()
        assert depth in DEPTHS, depth
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks=blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks=blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks=blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


def _stage(in_channels: int, channels: int, *, blocks: int, stride: int) -> nn.Sequential:
    """Return `blocks` blocks, the first of which takes `in_channels` and strides."""
    first = BasicBlock(in_channels, channels, stride=stride)
    return nn.Sequential(first, *(BasicBlock(channels, channels, stride=1) for _ in range(blocks - 1)))
