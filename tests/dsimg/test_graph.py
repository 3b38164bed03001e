"""What can be cut: units that hold on a network, names, kinds, what stays and why."""

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import VisionTransformer

from dsimg import graph
from dsimg.channels import Unit
from dsimg.errors import ModelError
from dsimg.graph import find_units
from dsimg.models import build_model, primary_logits
from dsimg.pruned import cut
from tests.nets import with_batchnorm, without_batchnorm

SLOW = (
    *("resnet18", "resnet50", "wide_resnet50_2", "resnext50_32x4d", "vgg11", "vgg16_bn", "alexnet"),
    *("squeezenet1_0", "densenet121", "googlenet", "inception_v3", "mobilenet_v2", "mobilenet_v3_small"),
    *("mobilenet_v3_large", "mnasnet0_5", "mnasnet1_0", "efficientnet_b0", "efficientnet_v2_s", "regnet_y_400mf"),
    *("regnet_x_800mf", "convnext_tiny", "shufflenet_v2_x1_0", "cifar_resnet56"),
)


def block(inputs: int, outputs: int, *, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, groups=groups, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Head(nn.Module):
    """Pooling and a linear layer behind a body."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.fc = body, nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.body(images).mean((2, 3)))
        return logits


class Dense(nn.Module):
    """Each layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = block(3, 6), block(6, 4), block(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        both = torch.cat((first, self.second(first)), 1)
        return torch.cat((both, self.third(both)), 1)


class SqueezeExcite(nn.Module):
    """A gate over depthwise channels."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.depthwise = block(3, 12), block(12, 12, groups=12)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.expand(x))
        return x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class Between(nn.Module):
    """`operation` between two layers: (N, 8, H, W) -> (N, 8, H, W)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.stem = block(3, 8)
        self.inner = nn.Sequential(block(8, 6), block(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.name == "chunk":
            first, second = x.chunk(2, 1)
            x = torch.cat((second, first), 1)
        elif self.name == "fixed":
            x = x.view(-1, 8, *x.shape[2:]) + 0
        elif self.name == "middle":  # a shortcut from 4 channels, padded on both sides as if 8 could not change
            x = x + F.pad(x[:, 2:6], (0, 0, 0, 0, 2, 2))
        elif self.name == "shuffle":
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        y: Tensor = self.inner(x)
        return y


def random_statistics(model: nn.Module) -> nn.Module:
    """Give BatchNorm layers weights and statistics that are not 0 and 1."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


def check_units(model: nn.Module, units: Sequence[Unit], size: int, *, exact: bool = True) -> None:
    """Cut up to a third of every unit's channels: the logits are those of the network in which these are zero.

    Zero are the weights that make a channel, not those that read it. `exact` is False where a norm takes its
    statistics over the channels.
    """
    generator = np.random.default_rng(0)
    model = copy.deepcopy(model).eval()
    state = model.state_dict()
    taken: set[tuple[str, int, int]] = set()
    for unit in units:
        assert unit.channels >= 2
        for part in unit.slices:
            assert part.index.shape[0] == unit.channels
            places = {(part.tensor, part.dim, int(position)) for position in part.index.reshape(-1)}
            assert len(places) == part.index.size
            assert not taken & places
            assert part.index.max() < state[part.tensor].shape[part.dim]
            taken |= places
    lost = [generator.choice(u.channels, generator.integers(1, u.channels // 3 + 2), replace=False) for u in units]
    zeroed, narrow = copy.deepcopy(model), copy.deepcopy(model)
    tensors = zeroed.state_dict()
    for unit, channels in zip(units, lost, strict=True):
        for part in unit.slices:
            if part.dim == 0:
                tensors[part.tensor][torch.from_numpy(part.index[channels].reshape(-1))] = 0
    cut(narrow, units, [np.setdiff1d(np.arange(u.channels), gone) for u, gone in zip(units, lost, strict=True)])
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before, wanted, given = model(images), zeroed(images), narrow(images)
    assert given.shape == wanted.shape
    if exact:
        assert float((given - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
        assert float((given - before).abs().max()) > 1e-3 * float(wanted.abs().max())
    if hasattr(narrow, "aux_logits"):
        assert primary_logits(narrow.train()(images)).shape == given.shape


def test_fire_modules() -> None:
    torch.manual_seed(0)
    model = build_model("squeezenet1_1", num_classes=5)
    units = find_units(model, input_size=64).units
    assert len(units) == 1 + 8 * 3
    check_units(model, units, 64)


@pytest.mark.slow
@pytest.mark.parametrize("arch", SLOW)
def test_units_hold_on_every_family(arch: str) -> None:
    size = {"cifar_resnet56": 32, "inception_v3": 299, "googlenet": 224}.get(arch, 128)
    torch.manual_seed(0)
    model = random_statistics(build_model(arch, num_classes=5))
    found = find_units(model, input_size=size)
    check_units(model, found.units, size, exact=not arch.startswith("convnext"))
    assert bool(found.notes) == arch.startswith("shufflenet")


def shapes(units: Sequence[Unit]) -> dict[str, tuple[int, int]]:
    return {unit.name: (unit.channels, unit.width) for unit in units}


def test_units_of_a_padded_shortcut_are_three() -> None:
    torch.manual_seed(0)
    model = random_statistics(build_model("cifar_resnet20", num_classes=5))
    units = find_units(model, input_size=32).units
    check_units(model, units, 32)
    stream = [unit for unit in units if unit.name in ("conv1", "layer2.0.conv2", "layer3.0.conv2")]
    assert shapes(stream) == {"conv1": (16, 1), "layer2.0.conv2": (16, 1), "layer3.0.conv2": (32, 1)}
    (columns,) = (part.index for part in stream[1].slices if part.tensor == "fc.weight")
    assert columns.reshape(-1).tolist() == list(range(16, 32))
    inner = [unit for unit in units if unit not in stream]
    assert [unit.channels for unit in inner] == [16] * 3 + [32] * 3 + [64] * 3
    assert {unit.kind for unit in inner} == {"Conv2d:0 BatchNorm2d:0 Conv2d:1"}


def test_a_narrowed_network_has_units_too() -> None:
    torch.manual_seed(0)
    model = random_statistics(build_model("cifar_resnet20", num_classes=5))
    units = find_units(model, input_size=32).units
    cut(model, units, [np.arange(unit.channels - 3) for unit in units])
    narrowed = find_units(model, input_size=32)
    assert [unit.channels for unit in narrowed.units] == [unit.channels - 3 for unit in units]
    assert [unit.kind for unit in narrowed.units] == [unit.kind for unit in units]
    assert narrowed.notes == ()
    check_units(model, narrowed.units, 32)


def test_grouped_convolutions_lose_whole_groups() -> None:
    body = nn.Sequential(block(3, 24), block(24, 24, groups=6), block(24, 24, groups=4), block(24, 8))
    model = random_statistics(Head(body, 8))
    units = find_units(model, input_size=8).units
    # Groups of 4 and of 6 channels in one unit: 12, the least common multiple.
    assert shapes(units) == {"body.0.0": (2, 12), "body.3.0": (8, 1)}
    assert [part.dim for part in units[0].slices if part.tensor == "body.1.0.weight"] == [0]
    check_units(model, units, 8)


def test_a_convolution_that_makes_two_channels_of_each_loses_both() -> None:
    model = random_statistics(Head(nn.Sequential(block(3, 6), block(6, 12, groups=6), block(12, 8)), 8))
    units = find_units(model, input_size=8).units
    assert shapes(units) == {"body.0.0": (6, 1), "body.2.0": (8, 1)}
    assert [part.index[1].tolist() for part in units[0].slices if part.tensor == "body.1.0.weight"] == [[2, 3]]
    check_units(model, units, 8)


def test_concatenations_have_offsets() -> None:
    model = random_statistics(Head(Dense(), 18))
    units = find_units(model, input_size=8).units
    assert shapes(units) == {"body.first.0": (6, 1), "body.second.0": (4, 1), "body.third.0": (8, 1)}
    columns = {part.tensor: part.index.reshape(-1).tolist() for part in units[1].slices if part.dim == 1}
    assert columns == {"fc.weight": [6, 7, 8, 9], "body.third.0.weight": [6, 7, 8, 9]}
    check_units(model, units, 8)


def test_a_gate_goes_with_its_channels() -> None:
    model = random_statistics(Head(SqueezeExcite(), 12))
    units = find_units(model, input_size=8).units
    assert shapes(units) == {"body.expand.0": (12, 1), "body.squeeze": (4, 1)}
    check_units(model, units, 8)


def test_a_flattened_channel_is_several_columns() -> None:
    model = random_statistics(with_batchnorm(5))
    units = find_units(model, input_size=32).units
    assert shapes(units) == {"0": (8, 1), "3": (16, 1)}
    assert [part.index[2].tolist() for part in units[1].slices if part.tensor == "6.weight"] == [[8, 9, 10, 11]]
    check_units(model, units, 32)


def test_group_norm_loses_whole_groups() -> None:
    model = without_batchnorm(5)
    units = find_units(model, input_size=32).units
    assert shapes(units) == {"0": (2, 4), "3": (16, 1)}
    check_units(model, units, 32)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("chunk", graph.SPLIT), ("fixed", graph.UNSOUND), ("middle", graph.SPLIT), ("shuffle", graph.UNSOUND)],
)
def test_what_the_forward_fixes_stays(name: str, reason: str) -> None:
    model = random_statistics(Head(Between(name), 8))
    found = find_units(model, input_size=8)
    assert shapes(found.units) == {"body.inner.0.0": (6, 1), "body.inner.1.0": (8, 1)}
    assert found.notes == (f"The channels of body.stem.0 stay: {reason}.",)
    check_units(model, found.units, 8)


def test_shuffled_channels_stay_and_inner_widths_go() -> None:
    torch.manual_seed(0)
    model = random_statistics(build_model("shufflenet_v2_x0_5", num_classes=5))
    found = find_units(model, input_size=32)
    check_units(model, found.units, 32)
    blocks = [f"stage{stage}.{number}" for stage, count in ((2, 4), (3, 8), (4, 4)) for number in range(count)]
    assert [unit.name for unit in found.units] == [f"{name}.branch2.0" for name in blocks]
    assert found.notes == (
        "torch-pruning cannot follow the forward of ShuffleNetV2 (ZeroDivisionError: integer division or modulo by "
        "zero), a channel shuffle for example: only the widths inside its blocks are cut.",
    )


def test_protected_modules_keep_their_outputs() -> None:
    model = Head(nn.Sequential(block(3, 6), block(6, 4), block(4, 8)), 8)
    assert [unit.name for unit in find_units(model, input_size=8, protect=["body.1"]).units] == ["body.0.0", "body.2.0"]
    assert [unit.name for unit in find_units(model, input_size=8, protect=["body.2.1"]).units] == [
        *("body.0.0", "body.1.0")
    ]
    with pytest.raises(ModelError, match=r"no module 'bodi' to protect, did you mean 'body'\?"):
        find_units(model, input_size=8, protect=["bodi"])


def test_protect_holds_in_transformers() -> None:
    model = VisionTransformer(32, 16, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=32, num_classes=5)
    names = {unit.name for unit in find_units(model, input_size=32).units}
    first = "encoder.layers.encoder_layer_0.mlp"
    left = {unit.name for unit in find_units(model, input_size=32, protect=[first]).units}
    assert left < names
    assert not any(name.startswith(first) for name in left)


@pytest.mark.parametrize("protect", [["body"], ["body.0", "body.1"]])
def test_nothing_to_cut_is_an_error(protect: list[str]) -> None:
    model = Head(nn.Sequential(block(3, 6), block(6, 8)), 8)
    with pytest.raises(ModelError, match="nothing in Head can be pruned: no layer has a width that is not protected"):
        find_units(model, input_size=8, protect=protect)


def test_a_plan_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "TRACE_SECONDS", 0)
    with pytest.raises(ModelError, match="cannot follow the forward of CifarResNet \\(TimeoutError: no end after 0 s"):
        find_units(build_model("cifar_resnet20", num_classes=5), input_size=32)


def test_the_network_does_not_change() -> None:
    model = Head(nn.Sequential(block(3, 6), block(6, 8)), 8)
    model.body.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert shapes(find_units(model, input_size=8).units) == {"body.0.0": (6, 1), "body.1.0": (8, 1)}
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == ["fc.weight", "fc.bias"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_layer_norm_is_tried_without_its_statistics() -> None:
    body = nn.Sequential(nn.Flatten(1), nn.Linear(48, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 6), nn.PReLU())
    model = nn.Sequential(body, nn.Linear(6, 5))
    found = find_units(model, input_size=4)
    assert shapes(found.units) == {"0.1": (12, 1), "0.4": (6, 1)}
    assert found.notes == ()
    check_units(model, found.units, 4, exact=False)


def test_a_tensor_that_several_modules_share_stays() -> None:
    """Narrowing it once a name would narrow it twice."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    model[4].weight = model[2].weight
    found = find_units(model, input_size=16)
    assert [unit.name for unit in found.units] == ["6"]
    assert any("several modules share a tensor" in note for note in found.notes)
