"""dsimg.recompute: gradient checkpointing changes memory and time, and nothing else."""

import copy

import pytest
import torch
from torch import nn

from dsimg.errors import ModelError
from dsimg.models import build_model, has_batchnorm, split_outputs
from dsimg.recompute import enable_gradient_checkpointing
from tests.dsimg.model_cases import assert_equal_states, resnet

# One network of each torchvision family: side in pixels, blocks (0: has none).
FAMILIES = {
    "alexnet": (64, 0),
    "convnext_tiny": (64, 18),
    "densenet121": (32, 58),
    "efficientnet_b0": (32, 16),
    "googlenet": (64, 11),
    "inception_v3": (299, 12),
    "maxvit_t": (224, 33),
    "mnasnet0_5": (32, 16),
    "mobilenet_v2": (32, 17),
    "mobilenet_v3_small": (32, 11),
    "regnet_y_400mf": (32, 16),
    "resnet18": (32, 8),
    "shufflenet_v2_x0_5": (32, 16),
    "squeezenet1_1": (32, 8),
    "swin_t": (64, 12),
    "vgg11_bn": (32, 0),
    "vit_b_16": (64, 12),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("arch", FAMILIES)
def test_each_family_finds_its_blocks(arch):
    size, blocks = FAMILIES[arch]
    with torch.device("cpu" if arch.startswith("regnet") else "meta"):
        model = build_model(arch, num_classes=7, input_size=size)
    if blocks:
        names = list(model.state_dict())
        assert enable_gradient_checkpointing(model) == blocks
        assert list(model.state_dict()) == names
    else:
        with pytest.raises(ModelError, match="has no stages of blocks to recompute"):
            enable_gradient_checkpointing(model)


def test_a_timm_network_finds_its_blocks():
    pytest.importorskip("timm", reason="needs the timm extra")
    assert enable_gradient_checkpointing(build_model("timm:vit_tiny_patch16_224", num_classes=5)) == 12


def step(model: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """One forward and backward from a fixed random state; the gradients by name."""
    torch.manual_seed(1)
    model.train()
    main, aux = split_outputs(model(images))
    loss = main.square().sum() + sum(logits.square().sum() for logits, _ in aux)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("arch", "size"),
    [
        ("cifar_resnet20", 16),
        ("densenet121", 32),  # blocks that take a list
        ("efficientnet_b0", 32),  # dropout and stochastic depth
        ("googlenet", 64),  # no stages, auxiliary heads
        ("swin_t", 32),  # buffers that are not statistics, attention
    ],
)
def test_gradient_checkpointing_changes_neither_gradients_nor_statistics(arch, size):
    plain = build_model(arch, num_classes=3, input_size=size)
    recomputed = copy.deepcopy(plain)
    enable_gradient_checkpointing(recomputed)
    images = torch.rand(2, 3, size, size)
    for _ in range(2):
        expected, found = step(plain, images), step(recomputed, images)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-6, msg=name)
    assert_equal_states(recomputed.state_dict(), plain.state_dict())
    counts = [buffer.item() for name, buffer in recomputed.named_buffers() if name.endswith("num_batches_tracked")]
    assert set(counts) <= {2}
    assert bool(counts) == has_batchnorm(plain)


def test_gradient_checkpointing_does_recompute():
    model = resnet()
    enable_gradient_checkpointing(model)
    calls = []
    model.layer1[0].conv1.register_forward_hook(lambda *_: calls.append(1))
    step(model, torch.rand(2, 3, 16, 16))
    assert len(calls) == 2
    model.eval()(torch.rand(2, 3, 16, 16))
    assert len(calls) == 3


def test_a_copy_of_a_checkpointed_model_is_independent():
    model = resnet()
    enable_gradient_checkpointing(model)
    twin = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    step(twin, torch.rand(2, 3, 16, 16))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_equal_states(model.state_dict(), before)


def test_recomputation_puts_the_same_buffers_back():
    model = resnet()
    enable_gradient_checkpointing(model)
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    step(model, torch.rand(2, 3, 16, 16))
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
