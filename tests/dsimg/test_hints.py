"""Features of named layers: which are caught, through which adapters, and how they are compared."""

import copy

import pytest
import torch
from torch import nn

from dsimg import losses
from dsimg.errors import ConfigError
from dsimg.hints import ADAPTERS, Hints
from dsimg.recompute import enable_gradient_checkpointing
from tests import nets


def pair(*layers: str, student: nn.Module | None = None, teacher: nn.Module | None = None) -> Hints:
    """Return the hints between two networks for 32 x 32 images; by default a student of 8 and 16 channels."""
    teacher = teacher or wide_teacher()
    return Hints(student or nets.with_batchnorm(2), teacher, layers, size=32, ask_teacher=teacher)


def wide_teacher() -> nn.Module:
    """A network whose layer 2 gives (12, 16, 16)."""
    return nn.Sequential(nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.ReLU(), nn.Identity(), nn.Flatten()).eval()


def test_features_are_compared_through_adapters_that_belong_to_the_student() -> None:
    student, teacher = nets.with_batchnorm(2), wide_teacher()
    before = set(student.state_dict())
    hints = pair("2", "3:1", student=student, teacher=teacher)
    added = {name: tuple(tensor.shape) for name, tensor in student.state_dict().items() if name not in before}
    assert added == {
        f"{ADAPTERS}.0.weight": (12, 8, 1, 1),
        f"{ADAPTERS}.0.bias": (12,),
        f"{ADAPTERS}.1.weight": (12, 16, 1, 1),
        f"{ADAPTERS}.1.bias": (12,),
    }
    images = torch.randn(4, 3, 32, 32)
    twin = copy.deepcopy(student).train()
    logits = student.train()(images)
    with torch.no_grad():
        teacher(images)
    found = hints.difference()
    assert found.shape == (4,)

    layers, adapters = list(twin.children()), twin.get_submodule(ADAPTERS)
    shallow = nn.Sequential(*layers[:3])(images)  # (4, 8, 8, 8)
    deep = layers[3](shallow)  # (4, 16, 2, 2)
    taught = teacher[1](teacher[0](images)).detach()  # type: ignore[index]  # (4, 12, 16, 16)
    parts = [
        losses.hint(adapters.get_submodule("0")(shallow), nn.functional.adaptive_avg_pool2d(taught, 8)),
        losses.hint(adapters.get_submodule("1")(deep), nn.functional.adaptive_avg_pool2d(taught, 2)),
    ]
    torch.testing.assert_close(found, torch.stack(parts).mean(0))
    assert logits.shape == (4, 2)
    found.sum().backward()
    trained = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert trained == {*added, "0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}


def test_a_larger_students_map_is_averaged_down_to_the_teachers() -> None:
    student = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 32 * 32, 2))
    teacher = wide_teacher()
    hints = pair("0:1", student=student, teacher=teacher)
    images = torch.randn(2, 3, 32, 32)
    student.train()(images)
    teacher(images)
    said = student.get_submodule(f"{ADAPTERS}.0")(student[0](images))
    expected = losses.hint(nn.functional.adaptive_avg_pool2d(said, 16), teacher[1](teacher[0](images)))  # type: ignore[index]
    torch.testing.assert_close(hints.difference(), expected)


def test_an_evaluation_leaves_what_was_caught() -> None:
    student, teacher = nets.with_batchnorm(2), wide_teacher()
    hints = pair("2", student=student, teacher=teacher)
    images = torch.randn(4, 3, 32, 32)
    student.train()(images)
    teacher(images)
    before = hints.difference().detach()
    student.eval()(torch.zeros(4, 3, 32, 32))
    assert torch.equal(hints.difference(), before)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("layer3", r"--hint_layers: the student has no layer 'layer3'\. Its parts are 0, 1, 2, 3, 4, 5, 6\."),
        ("2:body", r"--hint_layers: the teacher has no layer 'body'\. Its parts are 0, 1, 2, 3\."),
        ("", r"--hint_layers: the student has no layer ''"),
        ("6:0", r"'6' of the student gives \(2, 2\), not a feature map \(N, C, H, W\)\. Name a block"),
        ("2:3", r"'3' of the teacher gives \(2, 3072\), not a feature map"),
    ],
)
def test_a_layer_that_is_none_is_named_in_one_message(layer: str, message: str) -> None:
    student = nets.with_batchnorm(2)
    with pytest.raises(ConfigError, match=message):
        pair(layer, student=student)
    assert not hasattr(student, ADAPTERS)


def test_a_layer_of_nearly_that_name_is_suggested() -> None:
    student = nn.Sequential()
    student.add_module("stem", nn.Conv2d(3, 4, 3))
    student.add_module("layer1", nn.Conv2d(4, 4, 3))
    with pytest.raises(ConfigError, match="has no layer 'layer2', did you mean 'layer1'"):
        pair("layer2:1", student=student)


class Unused(nets.Tiny):
    """A network with a layer that its forward leaves out."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes=num_classes, norm=True)
        self[2].spare = nn.Conv2d(3, 3, 1)


def test_a_layer_that_is_not_reached_is_said_to_give_nothing() -> None:
    with pytest.raises(ConfigError, match=r"'2\.spare' of the student gives no tensor, not a feature map"):
        pair("2.spare:1", student=Unused(2))


def blocks() -> nn.Module:
    """A stage of two blocks, and a head."""

    def block(inner: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inner, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))

    class Block(nn.Module):
        def __init__(self, inner: int) -> None:
            super().__init__()
            self.layers = block(inner)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            features: torch.Tensor = self.layers(images)
            return features

    return nn.Sequential(nn.Sequential(Block(3), Block(4)), nn.Flatten(), nn.Linear(4 * 32 * 32, 2))


@pytest.mark.parametrize("layer", ["0", "0.1", "0.1.layers.2"])
def test_features_are_the_same_where_activations_are_computed_again(layer: str) -> None:
    torch.manual_seed(0)
    plain, teacher = blocks(), wide_teacher()
    fewer = copy.deepcopy(plain)
    assert enable_gradient_checkpointing(fewer) == 2
    images = torch.randn(4, 3, 32, 32)
    gradients = []
    for student in (plain, fewer):
        torch.manual_seed(1)
        hints = pair(f"{layer}:1", student=student, teacher=teacher)
        logits = student.train()(images)
        teacher(images)
        (hints.difference().sum() + logits.square().sum()).backward()
        gradients.append({name: parameter.grad for name, parameter in student.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0])
    assert all(gradient is not None for gradient in gradients[0].values())
