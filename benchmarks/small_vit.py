"""A ViT small enough to be trained on CIFAR-10 in minutes, for benchmarks/quantize.py.

dsimg train --model benchmarks.small_vit:small_vit --data DIR --image_size 32 --optimizer adamw --augment light \\
    --out RUN
"""

from torch import nn
from torchvision.models import VisionTransformer


def small_vit(num_classes: int) -> nn.Module:
    """Return torchvision's ViT for 32x32 images in patches of 4x4: 4 layers, 128 wide, 4 heads."""
    vit: nn.Module = VisionTransformer(
        image_size=32, patch_size=4, num_layers=4, num_heads=4, hidden_dim=128, mlp_dim=512, num_classes=num_classes
    )
    return vit
