"""dsimg.cifar_resnet: the networks of He et al. 2015, section 4.2."""

import pytest
import torch
from torch import nn

from dsimg.cifar_resnet import CifarResNet
from dsimg.models import build_model, count_parameters


@pytest.mark.parametrize(
    ("depth", "published", "exact"),
    [
        (20, 0.27e6, 269_722),
        (32, 0.46e6, 464_154),
        (44, 0.66e6, 658_586),
        (56, 0.85e6, 853_018),
        (110, 1.7e6, 1_727_962),
    ],
)
def test_cifar_resnets_have_the_paper_s_parameters(depth, published, exact):
    with torch.device("meta"):
        model = build_model(f"cifar_resnet{depth}", num_classes=10)
    assert count_parameters(model) == exact
    assert exact == pytest.approx(published, rel=0.02)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == depth - 1  # and one linear layer: no convolution in the shortcuts


def test_cifar_resnet_shortcut_subsamples_and_appends_zero_channels():
    block = CifarResNet(20, num_classes=2).layer2[0].eval()
    nn.init.zeros_(block.bn2.weight)  # the residual branch gives zero: the shortcut is what is left
    images = torch.rand(2, 16, 8, 8)
    out = block(images)
    assert torch.equal(out[:, :16], images[:, :, ::2, ::2])
    assert torch.equal(out[:, 16:], torch.zeros(2, 16, 4, 4))


def test_cifar_resnet_keeps_channels_last():
    model = CifarResNet(20, num_classes=2).to(memory_format=torch.channels_last)
    images = torch.rand(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    assert model.layer3(model.layer2(model.layer1(model.bn1(model.conv1(images))))).is_contiguous(
        memory_format=torch.channels_last
    )
