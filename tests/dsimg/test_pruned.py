"""dsimg.pruned: what was cut is JSON, and the narrower network comes back from it to the bit, with dsimg or without."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torchvision
from torch import Tensor, nn

from dsimg.channels import Slice, Unit
from dsimg.errors import ModelError, RunError
from dsimg.graph import find_units
from dsimg.pruned import Record, cut, read_record, rebuild
from dsimg.weights import read_weights, restore_weights, save_weights

SIDE = 64
IMAGES = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(5))


def resnet() -> nn.Module:
    """Return a network whose every tensor is random, running statistics too."""
    torch.manual_seed(1)
    model = torchvision.models.resnet18(num_classes=5)
    for name, tensor in model.state_dict().items():
        if "running" in name:
            tensor.uniform_(0.5, 1.5)
    return model.eval()


def halves(model: nn.Module, *, before: Record | None = None, seed: int) -> Record:
    """Cut half of each unit's channels, drawn at random."""
    rng = np.random.default_rng(seed)
    units = find_units(model, input_size=SIDE).units
    kept = [np.sort(rng.choice(unit.channels, unit.channels // 2, replace=False)) for unit in units]
    return cut(model, units, kept, before=before)


def part_of(tensor: Tensor, record: Record, name: str) -> Tensor:
    """Return what a record says is left of a tensor of the architecture."""
    for dim, positions in record.kept.get(name, {}).items():
        tensor = tensor.index_select(dim, torch.from_numpy(positions))
    return tensor


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    return resnet()


@pytest.fixture(scope="module")
def once(dense: nn.Module) -> tuple[nn.Module, Record]:
    model = copy.deepcopy(dense)
    return model, halves(model, seed=0)


@pytest.fixture(scope="module")
def twice(once: tuple[nn.Module, Record]) -> tuple[nn.Module, Record]:
    model = copy.deepcopy(once[0])
    return model, halves(model, before=once[1], seed=1)


@pytest.fixture(scope="module")
def folder(twice: tuple[nn.Module, Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a run keeps of the network."""
    folder = tmp_path_factory.mktemp("run")
    model, record = twice
    record.save(folder / "pruning.json")
    save_weights(model.state_dict(), folder / "weights.safetensors")
    return folder


def assert_same_network(found: nn.Module, expected: nn.Module) -> None:
    states = found.state_dict(), expected.state_dict()
    assert list(states[0]) == list(states[1])
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    with torch.no_grad():
        assert torch.equal(found.eval()(IMAGES), expected(IMAGES))


def test_each_kept_position_is_one_of_the_architectures(
    dense: nn.Module, once: tuple[nn.Module, Record], twice: tuple[nn.Module, Record]
) -> None:
    whole = dense.state_dict()
    assert sum(tensor.numel() for tensor in once[0].parameters()) < 0.3 * sum(t.numel() for t in dense.parameters())
    assert twice[0].state_dict()["layer4.0.conv1.weight"].shape == (128, 64, 3, 3)
    assert twice[0].state_dict()["fc.weight"].shape == (5, 128)
    for model, record in (once, twice):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, part_of(whole[name], record, name)), name
    assert twice[1].kept["conv1.weight"][0].tolist() == [
        position for position in once[1].kept["conv1.weight"][0].tolist() if position in twice[1].kept["bn1.weight"][0]
    ]


def test_a_network_cut_twice_comes_back_from_its_architecture(folder: Path, twice: tuple[nn.Module, Record]) -> None:
    torch.manual_seed(9)
    fresh = torchvision.models.resnet18(num_classes=5)
    rebuild(fresh, read_record(folder / "pruning.json"))
    restore_weights(fresh, read_weights(folder / "weights.safetensors"), source="the run")
    assert_same_network(fresh, twice[0])
    assert (fresh.get_submodule("layer4.0.conv1").out_channels, fresh.get_submodule("fc").in_features) == (128, 128)


def test_a_rebuilt_network_keeps_what_stayed_of_its_own_weights(
    dense: nn.Module, twice: tuple[nn.Module, Record]
) -> None:
    model = copy.deepcopy(dense)
    model(IMAGES).sum().backward()
    rebuild(model, twice[1])
    assert_same_network(model, twice[0])
    assert model.get_submodule("conv1").weight.grad is None  # of the old shape
    model.train()(IMAGES).sum().backward()
    assert model.get_submodule("conv1").weight.grad.shape == (16, 3, 7, 7)  # type: ignore[union-attr]


def test_five_lines_of_plain_pytorch_rebuild_it(folder: Path, twice: tuple[nn.Module, Record]) -> None:
    lines = """
model = torchvision.models.resnet18(num_classes=5)
for name, attributes in json.load(open("RUN/pruning.json"))["modules"].items():
    vars(model.get_submodule(name)).update(attributes)
state = safetensors.torch.load_file("RUN/weights.safetensors")
for name, tensor in model.state_dict(keep_vars=True).items():
    tensor.data = state[name]
"""
    with (folder / "pruning.json").open() as stream:
        names: dict[str, Any] = {
            "json": json,
            "safetensors": safetensors,
            "torchvision": torchvision,
            "open": lambda _: stream,
        }
        exec(lines.replace("RUN", str(folder)), names)
    assert_same_network(names["model"], twice[0])


def test_the_file_is_json_in_which_equal_lists_stand_once(folder: Path, twice: tuple[nn.Module, Record]) -> None:
    content = json.loads((folder / "pruning.json").read_text())
    assert sorted(content) == ["kept", "modules", "schema", "tensors"]
    assert content["schema"] == 1
    assert content["modules"]["layer1.0.conv1"] == {"out_channels": 16, "in_channels": 16}
    uses = [number for dims in content["tensors"].values() for number in dims.values()]
    assert len(uses) > 6 * len(content["kept"])
    assert content["tensors"]["layer1.0.conv1.weight"]["0"] == content["tensors"]["layer1.0.bn1.running_var"]["0"]
    again = read_record(folder / "pruning.json")
    assert again.as_dict() == content
    assert again.modules == twice[1].modules
    for name, dims in twice[1].kept.items():
        for dim, positions in dims.items():
            assert np.array_equal(again.kept[name][dim], positions)


def test_nothing_cut_is_an_empty_record(dense: nn.Module) -> None:
    model = copy.deepcopy(dense)
    units = find_units(model, input_size=SIDE).units
    record = cut(model, units, [np.arange(unit.channels) for unit in units])
    assert record.as_dict() == {"schema": 1, "modules": {}, "tensors": {}, "kept": []}
    assert_same_network(model, dense)


def column(*positions: int) -> np.ndarray[Any, Any]:
    return np.array([[position] for position in positions], np.int64)


@pytest.mark.parametrize(
    ("layers", "slices", "attributes"),
    [
        (
            [nn.Conv2d(3, 4, 1), nn.PReLU(4), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)],
            [("0.weight", 0), ("0.bias", 0), ("1.weight", 0), ("2.weight", 0), ("2.bias", 0), ("3.weight", 1)],
            {
                "0": {"out_channels": 3},
                "1": {"num_parameters": 3},
                "2": {"out_channels": 3, "in_channels": 3, "groups": 3},
                "3": {"in_channels": 3},
            },
        ),
        (
            [nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)],
            [("0.weight", 0), ("0.bias", 0), ("1.weight", 0), ("1.bias", 0), ("2.weight", 1)],
            {"0": {"out_features": 3}, "1": {"normalized_shape": [3]}, "2": {"in_features": 3}},
        ),
        (
            [nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)],
            [("0.weight", 0), ("0.bias", 0), ("1.running_mean", 0), ("1.running_var", 0), ("2.weight", 1)],
            {"0": {"out_features": 3}, "1": {"num_features": 3}, "2": {"in_features": 3}},
        ),
    ],
)
def test_attributes_follow_the_tensors(
    layers: list[nn.Module], slices: list[tuple[str, int]], attributes: dict[str, dict[str, Any]]
) -> None:
    model = nn.Sequential(*layers)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    unit = Unit("0", "", 4, tuple(Slice(name, dim, column(0, 1, 2, 3)) for name, dim in slices))
    record = cut(model, [unit], [np.array([0, 2, 3])])
    assert record.modules == attributes
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, part_of(whole[name], record, name))
    model.eval()(torch.randn(2, 3, 5, 5) if isinstance(layers[0], nn.Conv2d) else torch.randn(2, 3))


def test_a_group_of_a_grouped_convolution_goes_as_a_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.GroupNorm(3, 6), nn.Conv2d(6, 6, 1, groups=3), nn.Conv2d(6, 2, 1))
    pairs = np.array([[0, 1], [2, 3], [4, 5]])
    parts = [(f"{layer}.{name}", 0) for layer in (0, 1, 2) for name in ("weight", "bias")]
    unit = Unit("0", "", 3, tuple(Slice(name, dim, pairs) for name, dim in [*parts, ("3.weight", 1)]), width=2)
    record = cut(model, [unit], [np.array([0, 2])])
    assert record.modules["1"] == {"num_channels": 4, "num_groups": 2}
    assert record.modules["2"] == {"out_channels": 4, "in_channels": 4, "groups": 2}
    assert record.kept["2.weight"][0].tolist() == [0, 1, 4, 5]
    assert model(torch.randn(2, 3, 5, 5)).shape == (2, 2, 5, 5)


def changed(record: Record, **values: Any) -> dict[str, Any]:
    return {**record.as_dict(), **values}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schema": 2}, r"has schema 2, this dsimg reads 1\. Use the dsimg version named in the run's run\.json"),
        ({"kept": "lost"}, r"is not one that dsimg wrote \(TypeError: .*\)\. Restore it"),
        ({"kept": [[0.5]]}, r"is not one that dsimg wrote \(TypeError: .*\)\. Restore it"),
        ({"kept": []}, r"is not one that dsimg wrote \(IndexError: .*\)\. Restore it"),
        ({"tensors": {"conv1.weight": {"zero": 0}}}, r"is not one that dsimg wrote \(ValueError: .*\)\. Restore it"),
        ({"tensors": {"conv1.weight": 3}}, r"is not one that dsimg wrote \(AttributeError: .*\)\. Restore it"),
        ({"modules": None}, r"is not one that dsimg wrote \(AttributeError: .*\)\. Restore it"),
    ],
)
def test_a_damaged_record_is_one_message(once: tuple[nn.Module, Record], values: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message) as caught:
        Record.from_dict(changed(once[1], **values))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"schema": 1', r"cannot read .*pruning\.json: .*\. Restore it from where it was copied from"),
        (b"[1, 2]", r"is not one that dsimg wrote \(KeyError: 'schema'\)"),
        (b'{"schema": 1}', r"is not one that dsimg wrote \(KeyError: 'kept'\)"),
        (None, r"cannot read .*pruning\.json: .*No such file"),
    ],
)
def test_a_file_that_is_no_record_is_one_message(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "pruning.json").write_bytes(content)
    with pytest.raises(RunError, match=message):
        read_record(tmp_path / "pruning.json")


@pytest.mark.parametrize("kept", [[-1, 0], [3, 600, 5], [[0]]])
def test_positions_that_the_architecture_has_not_are_one_message(
    dense: nn.Module, once: tuple[nn.Module, Record], kept: list[Any]
) -> None:
    model = copy.deepcopy(dense)
    with pytest.raises((ModelError, RunError)) as caught:
        rebuild(model, Record.from_dict(changed(once[1], kept=[kept] * len(once[1].as_dict()["kept"]))))
    assert str(caught.value).startswith("the pruning record ")
    assert_same_network(model, dense)  # as it was


@pytest.mark.parametrize("arch", ["mobilenet_v2", "resnet34", "resnet50"])
def test_a_foreign_record_is_one_message(arch: str) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(arch, num_classes=5)
        narrow = torchvision.models.resnet18(num_classes=5)
    foreign = halves_of_names(model)
    with pytest.raises(ModelError, match=r"does not fit this network: it has no \S+ as wide as there\. Build the arch"):
        rebuild(narrow, foreign)


def halves_of_names(model: nn.Module) -> Record:
    """Return a record that keeps the upper half of each tensor's first dimension."""
    upper = {
        name: {0: np.arange(tensor.shape[0] // 2, tensor.shape[0])}
        for name, tensor in model.state_dict().items()
        if tensor.dim()
    }
    return Record(upper, {})
