"""The networks that teach: how they are found, what they are shown, what they say, and what is asked of the student."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsimg import losses, weights
from dsimg.errors import ConfigError, DsimgError, ModelError
from dsimg.graph import find_units
from dsimg.loop import Targets
from dsimg.models import build_model
from dsimg.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from dsimg.pruned import Record, cut
from dsimg.recipe import Teaching
from dsimg.run import Run
from dsimg.teacher import Member, Teacher, digest_of, open_member, open_teacher, order_of
from dsimg.teaching import distillation_loss, loss_text
from dsimg.weights import save_weights
from dsimg.world import World, start_world
from tests import nets

CLASSES = ("ant", "bee", "cat")
STUDENT = Preprocess(input_size=(3, 32, 32), mean=IMAGENET_MEAN, std=IMAGENET_STD, crop_pct=1.0)


class Looking(nn.Module):
    """A network that says what it sees: the mean of the red and of the green pixels, and the height."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """images: (N, 3, H, W) -> (N, 3)."""
        height = torch.full((len(images),), float(images.shape[2]))
        return torch.stack([images[:, 0].mean((1, 2)), images[:, 1].mean((1, 2)), height], 1) * self.scale


class Broad(nn.Sequential):
    """A network with a layer that ZeRO-3 really shares out: smaller ones stay whole."""

    def __init__(self, num_classes: int) -> None:
        torch.manual_seed(5)
        convolution = nn.Conv2d(3, 8, 3, stride=4, padding=1)
        super().__init__(
            convolution, nn.ReLU(), nn.Flatten(), nn.Linear(512, 400), nn.ReLU(), nn.Linear(400, num_classes)
        )


def write_run(
    path: Path,
    arch: str,
    model: nn.Module,
    *,
    classes: tuple[str, ...] = CLASSES,
    preprocess: Preprocess = STUDENT,
    pruning: Record | None = None,
) -> str:
    """Write a finished run of a network as it is, and return its path."""
    run, _ = Run.begin(path, stage="train", config={})
    save_weights(model.state_dict(), path / "weights.safetensors")
    if pruning is not None:
        pruning.save(path / "pruning.json")
    described = {"arch": arch, "num_classes": len(classes), "classes": list(classes)}
    run.finish(seed=0, model={**described, "preprocess": preprocess.as_dict()}, metrics={})
    return str(path)


def trained(seed: int) -> nn.Module:
    """Return a network in eval mode whose BatchNorm has seen something."""
    torch.manual_seed(seed)
    model = nets.with_batchnorm(num_classes=3)
    with torch.no_grad():
        model(torch.randn(16, 3, 32, 32) + seed)
    return model.eval()


def views(n: int = 4) -> Tensor:
    """Return normalised images (N, 3, 32, 32)."""
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def teacher_of(*members: Member, world: World, precision: str = "fp32", sharded: bool = False) -> Teacher:
    return Teacher(members, student=STUDENT, world=world, precision=precision, sharded=sharded)


@pytest.fixture(scope="module")
def world() -> World:
    """A world of one rank."""
    return start_world()


@torch.no_grad()
def test_a_run_says_what_its_network_says_in_the_students_order(tmp_path: Path, world: World) -> None:
    model = trained(1)
    source = write_run(tmp_path / "run", "tests.nets:with_batchnorm", model, classes=("cat", "ant", "bee"))
    member = open_member(source, classes=CLASSES, student=STUDENT)
    assert member.order == (1, 2, 0)
    assert torch.equal(teacher_of(member, world=world).logits(views()), model(views())[:, [1, 2, 0]])


@torch.no_grad()
def test_several_teach_the_mean_of_their_probabilities(tmp_path: Path, world: World) -> None:
    models = [trained(seed) for seed in (1, 2, 3)]
    names = [CLASSES, ("bee", "cat", "ant"), CLASSES]
    sources = [
        write_run(tmp_path / str(i), "tests.nets:with_batchnorm", model, classes=classes)
        for i, (model, classes) in enumerate(zip(models, names, strict=True))
    ]
    config = Teaching(teacher_precision="fp32")
    teacher, rows = open_teacher(sources, config, classes=CLASSES, student=STUDENT, world=world)
    orders = [[0, 1, 2], [2, 0, 1], [0, 1, 2]]
    expected = torch.stack([m(views())[:, o].softmax(1) for m, o in zip(models, orders, strict=True)]).mean(0)
    torch.testing.assert_close(teacher.logits(views()).softmax(1), expected, rtol=0, atol=1e-6)
    assert [row[0] for row in rows] == ["teacher", "", "", ""]
    assert rows[-1][1] == "in fp32, 18.8 KiB, whole on each rank; the mean of their probabilities"


@torch.no_grad()
def test_a_pruned_run_teaches_as_it_is(tmp_path: Path, world: World) -> None:
    model = trained(1)
    units = find_units(model, input_size=32).units
    record = cut(model, units, [np.arange(0, unit.channels, 2) for unit in units])
    assert model[0].weight.shape[0] == 4  # type: ignore[index, union-attr]
    source = write_run(tmp_path / "run", "tests.nets:with_batchnorm", model, pruning=record)
    teacher, rows = open_teacher(
        [source], Teaching(teacher_precision="fp32"), classes=CLASSES, student=STUDENT, world=world
    )
    assert torch.equal(teacher.logits(views()), model(views()))
    assert f"{sum(parameter.numel() for parameter in model.parameters())}" in rows[0][1]


def test_a_function_gives_a_network_for_the_students_images(world: World) -> None:
    member = open_member("tests.dsimg.test_teacher:Looking", classes=CLASSES, student=STUDENT)
    said = teacher_of(member, world=world).logits(views())
    assert torch.equal(said[:, 0], views()[:, 0].mean((1, 2)))
    assert said[:, 2].tolist() == [32.0] * 4
    with pytest.raises(ModelError, match="has no function 'Lookin', did you mean 'Looking'"):
        open_member("tests.dsimg.test_teacher:Lookin", classes=CLASSES, student=STUDENT)
    with pytest.raises(ModelError, match=r"returns \(2, 3\) for two images instead of \(2, 5\)"):
        open_member("tests.dsimg.test_teacher:Three", classes=tuple("abcde"), student=STUDENT)


class Three(nets.Tiny):
    """A network of three classes, whatever it is asked for."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes=3, norm=True)


def test_published_weights_teach_imagenets_classes_alone(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    published = build_model("squeezenet1_1", num_classes=1000).eval()
    monkeypatch.setattr(weights, "_download", lambda entry: published.state_dict())
    ids = tuple(f"n{number:08d}" for number in range(1000))
    student = Preprocess(input_size=(3, 64, 64), mean=IMAGENET_MEAN, std=IMAGENET_STD, crop_pct=1.0)
    member = open_member("SqueezeNet1_1_Weights.DEFAULT", classes=ids, student=student)
    assert (member.arch, member.preprocess.input_size) == ("squeezenet1_1", (3, 224, 224))
    view = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        expected = published(F.interpolate(view, size=(224, 224), mode="bilinear", antialias=True))
    said = Teacher([member], student=student, world=world, precision="fp32", sharded=False).logits(view)
    torch.testing.assert_close(said, expected)
    with pytest.raises(
        ConfigError, match=r"knows the classes of ImageNet, the data has 3 others\. Train it on the data"
    ):
        open_member("SqueezeNet1_1_Weights.DEFAULT", classes=CLASSES, student=STUDENT)
    with pytest.raises(ModelError, match="torchvision has no weights 'Squeeze_Weights'"):
        open_member("Squeeze_Weights.DEFAULT", classes=CLASSES, student=STUDENT)
    with pytest.raises(ModelError, match=r"squeezenet1_1 has no weights 'SqueezeNet1_1_Weights\.V9'"):
        open_member("SqueezeNet1_1_Weights.V9", classes=CLASSES, student=STUDENT)


def test_a_source_that_is_nothing_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--source runs/gone is no run folder, no weights of torchvision's such as"):
        open_member("runs/gone", classes=CLASSES, student=STUDENT)
    with pytest.raises(DsimgError, match="is not a run folder"):
        open_member(str(tmp_path), classes=CLASSES, student=STUDENT)


def test_other_classes_are_named_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        order_of(("ant", "dog"), ("ant", *"bcdefgh"), flag="--source teacher")
    assert str(caught.value) == (
        "--source teacher was trained on other classes than the data has: it does not know b, c, d, e, f and 2 more; "
        "it alone knows dog. Give the data it was trained on, or train it on these images first: dsimg train --weights."
    )
    with pytest.raises(ConfigError, match=r"has: it alone knows cat\. Give"):
        order_of(CLASSES, ("ant", "bee"), flag="--source teacher")


def test_another_normalisation_and_size_are_those_of_the_teacher(tmp_path: Path, world: World) -> None:
    own = Preprocess(input_size=(3, 48, 48), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0), crop_pct=0.875)
    source = write_run(tmp_path / "run", "tests.dsimg.test_teacher:Looking", Looking(3), preprocess=own)
    teacher = teacher_of(open_member(source, classes=CLASSES, student=STUDENT), world=world)
    pixels = torch.tensor([[0.0, 0.25, 0.5], [1.0, 0.75, 0.1]])[:, :, None, None].expand(2, 3, 32, 32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (STUDENT.mean, STUDENT.std))
    said = teacher.logits((pixels - mean) / std)
    expected = torch.tensor([[(0.0 - 0.1) / 0.5, (0.25 - 0.2) / 0.25, 48], [(1 - 0.1) / 0.5, (0.75 - 0.2) / 0.25, 48]])
    torch.testing.assert_close(said, expected, rtol=0, atol=2e-6)


def test_a_teacher_only_looks(world: World) -> None:
    model = nn.Sequential(nn.Dropout(0.5), trained(1)).train()
    before = copy.deepcopy(model.state_dict())
    teacher = teacher_of(Member("x", "x", model, STUDENT, (0, 1, 2)), world=world)
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        said = teacher.logits(views().requires_grad_())
        assert torch.equal(torch.get_rng_state(), state)
    assert not said.requires_grad
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(said, teacher.logits(views()))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert teacher.seconds > 0


@pytest.mark.parametrize("sharded", [False, True])
def test_a_teacher_in_bf16_leaves_fp32_to_the_others(world: World, *, sharded: bool) -> None:
    model = trained(1)
    expected = copy.deepcopy(model).bfloat16()(views().bfloat16()).float().detach()
    member = Member("x", "x", copy.deepcopy(model), STUDENT, (0, 1, 2))
    said = teacher_of(member, world=world, precision="bf16", sharded=sharded).logits(views())
    assert torch.equal(said, expected)
    assert said.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert model(views()).dtype == torch.float32


def test_a_sharded_teacher_says_the_same(world: World) -> None:
    member = Member("x", "x", Broad(3), STUDENT, (0, 1, 2))
    expected = Broad(3)(views()).detach()
    teacher = teacher_of(member, world=world, sharded=True)
    for _ in range(2):
        assert torch.equal(teacher.logits(views()), expected)
    assert member.model[3].weight.numel() == 0  # type: ignore[index]


# --- What the student learns from it


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Teaching(loss="kd"), "kd: 0.1 x cross-entropy with the true labels + 0.9 x T² KL(teacher, student), T = 4"),
        (
            Teaching(loss="kd", alpha=0.25, temperature=2),
            "kd: 0.75 x cross-entropy with the true labels + 0.25 x T² KL(teacher, student), T = 2",
        ),
        (Teaching(loss="dkd"), "dkd: cross-entropy with the true labels + 1 x T² (TCKD + 2 NCKD), T = 4"),
        (Teaching(), "dist: cross-entropy with the true labels + 2 x T² (inter + intra), T = 1"),
        (
            Teaching(loss="hint", hint_layers=("3",)),
            "hint: cross-entropy with the true labels + 100 x the features' mean squared difference",
        ),
    ],
)
def test_the_share_of_the_true_labels_is_stated(config: Teaching, text: str) -> None:
    assert loss_text(config) == text


@pytest.mark.parametrize(
    ("name", "mixed"), [("kd", False), ("kd", True), ("dkd", False), ("dist", False), ("dist", True)]
)
def test_the_loss_is_what_is_stated(world: World, name: Any, mixed: bool) -> None:
    model = trained(1)
    teacher = teacher_of(Member("x", "x", model, STUDENT, (0, 1, 2)), world=world)
    output, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    partners, lam = (torch.tensor([1, 0, 0, 2]), torch.tensor([0.25, 0.25, 0.5, 0.5])) if mixed else (None, None)
    present = torch.tensor([1.0, 1.0, 1.0, 0.0])
    targets = Targets(labels, partners, lam, present, np.arange(4), 0)
    config = Teaching(loss=name, alpha=0.3, temperature=2)
    found = distillation_loss(teacher, config, label_smoothing=0.1)(output, views(), targets)
    said = model(views()).detach()
    if partners is None or lam is None:
        on_labels = losses.cross_entropy(output, labels, label_smoothing=0.1)
    else:
        on_labels = losses.mixed_cross_entropy(output, labels, partners, lam, label_smoothing=0.1)
    share, part = {
        "kd": (0.7, losses.kd(output, said, temperature=2)),
        "dkd": (1.0, losses.dkd(output, said, labels, temperature=2, beta=2.0)),
        "dist": (1.0, losses.dist(output, said, temperature=2, weights=present)),
    }[name]
    torch.testing.assert_close(found, share * on_labels + 0.3 * part)


def test_a_caches_teacher_is_known_by_weights_order_and_view(tmp_path: Path, world: World) -> None:
    """A sharded one too, whose weights are elsewhere once it works."""
    member = Member("x", "x", Broad(3), STUDENT, (0, 1, 2))
    changed = copy.deepcopy(member.model)
    changed[3].weight.data[0, 0] += 1e-3  # type: ignore[index]
    others = [
        dataclasses.replace(member, model=changed),
        dataclasses.replace(member, order=(1, 0, 2)),
        dataclasses.replace(member, preprocess=dataclasses.replace(STUDENT, std=(1.0, 1.0, 1.0))),
    ]
    assert digest_of([member]) == digest_of([dataclasses.replace(member, name="y")])
    assert len({digest_of([member]), *(digest_of([other]) for other in others), digest_of([member, member])}) == 5
    source = write_run(tmp_path / "run", "tests.dsimg.test_teacher:Broad", member.model)
    for shard in ("no", "yes"):
        config = Teaching(cache_teacher=tmp_path / "cache", teacher_shard=shard, teacher_precision="bf16")  # type: ignore[arg-type]
        teacher, _ = open_teacher([source], config, classes=CLASSES, student=STUDENT, world=world)
        assert teacher.digest == digest_of([member])


def test_auxiliary_logits_learn_from_the_labels_alone(world: World) -> None:
    from torchvision.models import InceptionOutputs

    teacher = teacher_of(Member("x", "x", trained(1), STUDENT, (0, 1, 2)), world=world)
    loss = distillation_loss(teacher, Teaching(loss="kd", alpha=0.5), label_smoothing=0.0)
    targets = Targets(torch.tensor([0, 1]), None, None, torch.ones(2), np.arange(2), 0)
    main, auxiliary = torch.randn(2, 3), torch.randn(2, 3)
    more = loss(InceptionOutputs(main, auxiliary), views(2), targets) - loss(main, views(2), targets)
    torch.testing.assert_close(more, 0.5 * 0.4 * losses.cross_entropy(auxiliary, targets.labels, label_smoothing=0.0))
