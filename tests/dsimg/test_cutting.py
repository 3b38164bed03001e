"""dsimg.cutting: targets that are reached or said why not, and what a cut needs of the training images."""

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dsimg_export.session
from dsimg import cutting
from dsimg.channels import Slice, Unit
from dsimg.cutting import (
    Choice,
    Counted,
    Serving,
    Sessions,
    choose,
    mean_gradients,
    reestimate_batchnorm,
    sparsity_penalty,
    training_batches,
)
from dsimg.data import TrainImages
from dsimg.errors import ConfigError
from dsimg.graph import Found, find_units
from dsimg.models import count_macs
from dsimg.preprocess import normalise
from dsimg.pruned import cut
from dsimg.steps import epoch_order
from tests.dsimg.pictures import PADDED, settings, write_split
from tests.nets import with_batchnorm

SIDE = 32


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 96, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 4),
    )


@pytest.fixture(scope="module")
def found(model: nn.Module) -> Found:
    return find_units(model, input_size=SIDE)


def chosen(model: nn.Module, found: Found, goal: float, *, yardstick: Any = None, **options: Any) -> Choice:
    settings = {"importance": "group_norm", "round_to": 1, "max_ratio": 0.8, "gradients": None, "seed": 0}
    yardstick = yardstick or Counted(model, what="macs", side=SIDE)
    return choose(model, found, yardstick=yardstick, goal=goal, **{**settings, **options})


# Targets


@pytest.mark.parametrize("goal", [0.9, 0.5, 0.25, 0.1])
@pytest.mark.parametrize("what", ["macs", "params"])
def test_a_target_is_reached_and_is_what_the_cut_network_has(
    model: nn.Module, found: Found, what: Any, goal: float
) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    choice = chosen(model, found, goal, yardstick=Counted(model, what=what, side=SIDE))
    assert choice.shortfall is None
    assert abs(choice.share - goal) <= 0.03 * goal
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    narrow = with_cut(model, choice)
    if what == "macs":
        assert choice.share == count_macs(narrow, SIDE) / count_macs(model, SIDE)
    else:
        assert choice.share == total(narrow) / total(model)
    assert narrow(torch.randn(2, 3, SIDE, SIDE)).shape == (2, 4)


def with_cut(model: nn.Module, choice: Choice) -> nn.Module:
    narrow = copy.deepcopy(model)
    cut(narrow, choice.units, choice.kept)
    return narrow


def total(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("goal", "options", "share", "shortfall"),
    [
        (0.5, {"round_to": 128}, 1.0, "nothing is wider than 128 channels (--round_to) that may be cut"),
        (
            0.1,
            {"max_ratio": 0.5},
            0.26,
            "no more can go with --round_to 1, --max_ratio 0.5 and what is protected or cannot be cut",
        ),
        (0.4, {"round_to": 32}, 0.354, "blocks of 32 channels are that coarse here: give a smaller --round_to"),
    ],
)
def test_a_target_that_is_not_reached_says_why(
    model: nn.Module, found: Found, goal: float, options: dict[str, Any], share: float, shortfall: str
) -> None:
    choice = chosen(model, found, goal, **options)
    assert choice.shortfall == shortfall
    assert choice.share == pytest.approx(share, abs=0.01)


class Steps:
    """A yardstick that takes time, and goes down in steps as some sessions do."""

    cheap = False

    def __init__(self, *values: float) -> None:
        self.values, self.calls, self.seen = values, 0, 0

    def share(self, model: nn.Module) -> float:
        """Return one of the values, by how wide the network is."""
        self.calls += 1
        assert next(model.parameters()).device.type == "cpu"  # it is measured, so it needs its weights
        width = int(model.get_submodule("2").weight.shape[0])  # type: ignore[union-attr, index]
        return self.values[min(len(self.values) * (width - 1) // 96, len(self.values) - 1)]


def test_a_slow_yardstick_is_asked_few_times(model: nn.Module, found: Found) -> None:
    stairs = Steps(0.3, 1.0)
    choice = chosen(model, found, 0.5, yardstick=stairs)
    assert stairs.calls <= 10
    assert choice.share == 0.3
    assert choice.shortfall == "the session's latency makes steps there, and 10 measurements found none nearer"
    close = Steps(0.3, 0.494, 1.0)
    choice = chosen(model, found, 0.5, yardstick=close)
    assert (choice.share, choice.shortfall) == (0.494, None)
    assert close.calls <= 4  # 1.2 % is near enough: half of what counts as reached


def test_taylor_cuts_what_the_loss_does_not_need() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    head = model.get_submodule("3").weight
    with torch.no_grad():
        head[:, [1, 4, 6]] = 0.0  # type: ignore[operator, index]
        model.get_submodule("0").weight[[1, 4, 6]] *= 100  # type: ignore[operator, index]
    images = torch.randn(6, 3, SIDE, SIDE)
    gradients = mean_gradients(model, [(images, torch.arange(6) % 3)])
    choice = chosen(
        model, find_units(model, input_size=SIDE), 5 / 8, importance="taylor", gradients=gradients, max_ratio=0.9
    )
    assert [kept.tolist() for kept in choice.kept] == [[0, 2, 3, 5, 7]]


# Sessions

SERVING = Serving(batch=1, threads=1, int8=False)


def test_how_a_network_is_served_in_words() -> None:
    assert str(SERVING) == "fp32, batch 1, 1 thread"
    assert str(Serving(batch=8, threads=4, int8=True)) == "int8, batch 8, 4 threads"


def test_latency_is_measured_on_the_sessions_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two convolutions, a tenth of their channels left: the real exporter, quantizer and session."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 96, 3, padding=1), nn.ReLU(), nn.Conv2d(96, 96, 3, padding=1), nn.AdaptiveAvgPool2d(1)
    )
    model.extend([nn.Flatten(), nn.Linear(96, 2)])
    real = dsimg_export.session.latency
    monkeypatch.setattr(dsimg_export.session, "latency", lambda files, **rest: real(files, **{**rest, "seconds": 0.1}))
    said: list[str] = []
    sessions = Sessions(
        model, serving=SERVING, input_size=(3, SIDE, SIDE), calibration=torch.randn(9, 3, SIDE, SIDE), say=said.append
    )
    units = find_units(model, input_size=SIDE).units
    narrow = with_cut(model, Choice(units, [np.arange(10), np.arange(10)], 0.0, None))
    share = sessions.share(narrow)
    assert 0 < share < 0.6
    assert len(said) == 1
    assert said[0].startswith("measured: ")
    assert said[0].endswith(f" ms, {share:.3f} of the source's")
    seconds = sessions.seconds(("source", "candidate"), int8=(False, True))
    assert list(seconds) == ["source fp32", "source int8", "candidate fp32", "candidate int8"]
    assert seconds["candidate fp32"] < 0.6 * seconds["source fp32"]
    folder = sessions.file("source", int8=False).parent
    assert {path.name for path in folder.iterdir()} == {
        f"{name}{mark}.onnx" for name in ("source", "candidate") for mark in ("", "-int8")
    }
    sessions.add("candidate", model)  # replaced, and so is its quantized file
    assert sessions.file("candidate", int8=False).read_bytes() == sessions.file("source", int8=False).read_bytes()
    assert sessions.file("candidate", int8=True).read_bytes() == sessions.file("source", int8=True).read_bytes()
    sessions.close()
    assert not folder.exists()


@pytest.mark.parametrize(("threads", "expected"), [(1, "cpu"), (2, "median")])
def test_one_thread_is_measured_by_processor_time_and_several_by_the_clock(
    monkeypatch: pytest.MonkeyPatch, threads: int, expected: str
) -> None:
    asked: dict[str, Any] = {}

    def latency(files: dict[str, Path], **rest: Any) -> dict[str, Any]:
        asked.update(rest)
        return {name: SimpleNamespace(cpu=1.0, median=2.0) for name in files}

    monkeypatch.setattr(dsimg_export.session, "latency", latency)
    monkeypatch.setattr("dsimg.to_onnx.to_onnx", lambda model, path, **_: path.touch())
    sessions = Sessions(
        with_batchnorm(2),
        serving=Serving(batch=3, threads=threads, int8=False),
        input_size=(3, SIDE, SIDE),
        calibration=torch.zeros(1, 3, SIDE, SIDE),
        say=print,
    )
    assert sessions.seconds(("source",), int8=(False,)) == {"source fp32": {"cpu": 1.0, "median": 2.0}[expected]}
    sessions.close()
    assert asked == {"input_size": (3, SIDE, SIDE), "batch": 3, "threads": threads, "seconds": 2.0}


def test_without_onnx_runtime_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dsimg_export.session", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"measuring a session needs onnxruntime.*: pip install 'dsimg\[serve"):
        Sessions(
            with_batchnorm(2), serving=SERVING, input_size=(3, 32, 32), calibration=torch.zeros(1, 3, 32, 32), say=print
        )


# Images


def batches_of(folder: Path, *, count: int, images: int) -> Iterator[tuple[Tensor, Tensor]]:
    split = write_split(folder, images)
    setup: Any = SimpleNamespace(
        network=SimpleNamespace(preprocess=settings()), folder=SimpleNamespace(train=split), augmentation=PADDED
    )
    return training_batches(setup, count, seed=3, device=torch.device("cpu"))


def test_training_batches_are_the_first_epochs_first_images_in_batches_of_one_size(tmp_path: Path) -> None:
    batches = list(batches_of(tmp_path, count=65, images=70))
    assert [tuple(images.shape) for images, _ in batches] == [(33, 3, 32, 32), (32, 3, 32, 32)]  # and not 64 and 1
    split = write_split(tmp_path / "again", 70)
    order = epoch_order(70, seed=3, epoch=0)[:65]
    assert torch.cat([labels for _, labels in batches]).tolist() == split.labels[order].tolist()
    pixels, _ = TrainImages(split, settings(), PADDED, seed=3).batch(order, epoch=0)
    expected = normalise(pixels.permute(0, 2, 3, 1).numpy(), settings())
    np.testing.assert_allclose(torch.cat([images for images, _ in batches]).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_fewer_images_than_asked_for_are_all_of_them(tmp_path: Path) -> None:
    assert [len(labels) for _, labels in batches_of(tmp_path, count=2048, images=5)] == [5]


def test_gradients_are_those_of_the_mean_loss_and_leave_no_trace() -> None:
    """Softmax regression: d/dW = mean of (p - onehot) x, d/db = mean of (p - onehot)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3, 2))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model.get_submodule("2").weight.grad = torch.ones(2, 3)
    images, labels = torch.randn(5, 3, 1, 1), torch.tensor([0, 1, 1, 0, 1])
    gradients = mean_gradients(model, [(images[:3], labels[:3]), (images[3:], labels[3:])])
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    flat = images.flatten(1)
    model.eval()
    with torch.no_grad():
        error = model(images).softmax(1) - nn.functional.one_hot(labels, 2)
    torch.testing.assert_close(gradients["2.weight"], error.T @ flat / 5)
    torch.testing.assert_close(gradients["2.bias"], error.mean(0))
    assert torch.equal(gradients["unused"], torch.zeros(2))
    assert list(gradients) == ["unused", "2.weight", "2.bias"]


def test_batchnorm_gets_the_averages_of_the_batches() -> None:
    torch.manual_seed(0)
    norm, fixed = nn.BatchNorm2d(2, momentum=0.3), nn.BatchNorm2d(2, track_running_stats=False)
    model = nn.Sequential(nn.Dropout(0.9), norm, fixed, nn.BatchNorm2d(2))
    model.get_submodule("3").momentum = None  # type: ignore[assignment]
    norm.running_mean = torch.tensor([50.0, 60.0])
    model.eval()
    norm.train()  # whatever it was, all is as the whole was
    batches = [torch.randn(4, 2, 3, 3) * 2 + 1, torch.randn(8, 2, 3, 3) - 5]
    assert reestimate_batchnorm(model, iter(batches)) == 2
    means = torch.stack([batch.mean((0, 2, 3)) for batch in batches])
    variances = torch.stack([batch.var((0, 2, 3)) for batch in batches])
    assert norm.running_mean is not None
    assert norm.running_var is not None
    torch.testing.assert_close(norm.running_mean, means.mean(0))  # nothing was dropped
    torch.testing.assert_close(norm.running_var, variances.mean(0))
    assert int(norm.num_batches_tracked) == 2  # type: ignore[arg-type]
    assert (norm.momentum, model.get_submodule("3").momentum) == (0.3, None)
    assert [module.training for module in model.modules()] == [False] * 5
    model.train()
    reestimate_batchnorm(model, batches)
    assert [module.training for module in model.modules()] == [True] * 5


def test_without_batchnorm_no_image_is_read() -> None:
    def never() -> Iterator[Tensor]:
        raise AssertionError
        yield torch.zeros(1)

    assert reestimate_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4)), never()) == 0


# Sparsity


def positions(*rows: Sequence[int]) -> np.ndarray[Any, Any]:
    return np.array(rows, np.int64)


def pair(*, second: Sequence[float] = (0.0, 2.0, 4.0)) -> tuple[nn.Module, Unit]:
    """Two layers with three channels between them, whose squares are 1 + 0, 1 + 4 and 9 + 16."""
    model = nn.Sequential(nn.Linear(1, 3, bias=False), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1))
    with torch.no_grad():
        model.get_submodule("0").weight.copy_(torch.tensor([[1.0], [1.0], [3.0]]))  # type: ignore[operator]
        model.get_submodule("2").weight.copy_(torch.tensor([list(second)]))  # type: ignore[operator]
    one_each = positions([0], [1], [2])
    parts = [("0.weight", 0), ("1.running_mean", 0), ("2.weight", 1)]
    return model, Unit("0", "", 3, tuple(Slice(name, dim, one_each) for name, dim in parts))


def test_the_penalty_weighs_small_channels_most() -> None:
    model, unit = pair()
    sizes = np.sqrt([1.0, 5.0, 25.0])
    factors = 2 ** (4 * (5 - sizes) / (5 - 1))
    assert factors[[0, 2]].tolist() == [16.0, 1.0]
    penalty = sparsity_penalty(model, [unit], strength=0.1)()
    assert penalty.item() == pytest.approx(0.05 * float(factors @ [1.0, 5.0, 25.0]), rel=1e-6)
    penalty.backward()  # type: ignore[no-untyped-call]
    found = model.get_submodule("0").weight.grad
    np.testing.assert_allclose(found.flatten().numpy(), 0.1 * factors * [1, 1, 3], rtol=1e-5)  # type: ignore[union-attr]
    assert model.get_submodule("2").bias.grad is None


def test_two_units_add_up_and_a_channel_of_several_positions_counts_as_one() -> None:
    model = nn.Sequential(nn.Linear(1, 4, bias=False))
    with torch.no_grad():
        model.get_submodule("0").weight.copy_(torch.tensor([[1.0], [2.0], [2.0], [0.0]]))  # type: ignore[operator]
    heads = Unit("0", "", 2, (Slice("0.weight", 0, positions([0, 1], [2, 3])),), width=2)
    alone = 0.5 * (1 * 5 + 16 * 4)
    assert sparsity_penalty(model, [heads], strength=1.0)().item() == pytest.approx(alone)
    assert sparsity_penalty(model, [heads, heads], strength=1.0)().item() == pytest.approx(2 * alone)


def test_the_penalty_drives_small_channels_to_nothing_and_spares_the_largest() -> None:
    model, unit = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    penalty = sparsity_penalty(model, [unit], strength=1.0)
    for _ in range(10):
        optimizer.zero_grad()
        penalty().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    left = model.get_submodule("0").weight.detach().flatten() / torch.tensor([1.0, 1.0, 3.0])
    assert left[0] < 1e-3
    assert left[1] < 0.05
    assert left[2] == pytest.approx(0.95**10, rel=1e-4)


def test_equal_channels_have_a_finite_penalty() -> None:
    model, unit = pair(second=(8**0.5, 8**0.5, 0.0))
    penalty = sparsity_penalty(model, [unit], strength=2.0)()
    assert torch.isfinite(penalty)
    penalty.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(model.get_submodule("0").weight.grad).all()  # type: ignore[arg-type]


def test_constants_are_those_the_pages_name() -> None:
    assert (cutting.TOLERANCE, cutting.LATENCY_CALLS, cutting.BATCHNORM_IMAGES) == (0.03, 10, 2048)


class ReadsValues(nn.Sequential):
    """A network whose forward looks at numbers, which tensors without any do not have."""

    def forward(self, images: Tensor) -> Tensor:  # type: ignore[override]
        assert math.isfinite(images.mean().item())
        output: Tensor = super().forward(images)
        return output


def test_a_network_that_reads_values_is_counted_with_its_weights(model: nn.Module, found: Found) -> None:
    reads = ReadsValues(*copy.deepcopy(model))
    choice = chosen(reads, found, 0.5)
    assert abs(choice.share - 0.5) <= 0.03 * 0.5
    assert choice.share == chosen(model, found, 0.5).share


def test_whether_anything_is_cut_is_told_by_the_channels(model: nn.Module, found: Found) -> None:
    assert chosen(model, found, 0.5).cuts
    assert not chosen(model, found, 0.5, round_to=1000).cuts
