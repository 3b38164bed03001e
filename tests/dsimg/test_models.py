import argparse
import copy
import sys
import urllib.error
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn
from torchvision.models import GoogLeNetOutputs, InceptionOutputs, VisionTransformer

from dsimg.cifar_resnet import CifarResNet
from dsimg.errors import ModelError, RunError
from dsimg.models import (
    build_model,
    check_input_size,
    count_macs,
    count_parameters,
    default_preprocess,
    enable_gradient_checkpointing,
    has_batchnorm,
    head_names,
    load_weights,
    no_decay_names,
    parameter_groups,
    primary_logits,
    read_weights,
    restore_weights,
    save_weights,
    split_outputs,
)
from dsimg.run import Run

# One network of each torchvision family: side in pixels, head modules, checkpointed blocks (0: has none).
FAMILIES = {
    "alexnet": (64, ("classifier.6",), 0),
    "convnext_tiny": (64, ("classifier.2",), 18),
    "densenet121": (32, ("classifier",), 58),
    "efficientnet_b0": (32, ("classifier.1",), 16),
    "googlenet": (64, ("fc", "aux1.fc2", "aux2.fc2"), 11),
    "inception_v3": (299, ("fc", "AuxLogits.fc"), 12),
    "maxvit_t": (224, ("classifier.5",), 33),
    "mnasnet0_5": (32, ("classifier.1",), 16),
    "mobilenet_v2": (32, ("classifier.1",), 17),
    "mobilenet_v3_small": (32, ("classifier.3",), 11),
    "regnet_y_400mf": (32, ("fc",), 16),
    "resnet18": (32, ("fc",), 8),
    "shufflenet_v2_x0_5": (32, ("fc",), 16),
    "squeezenet1_1": (32, ("classifier.1",), 8),
    "swin_t": (64, ("head",), 12),
    "vgg11_bn": (32, ("classifier.6",), 0),
    "vit_b_16": (64, ("heads.head",), 12),
}


@pytest.fixture(autouse=True)
def _seed_and_one_thread():
    """Two threads wait for one another at every small layer: forty times slower where the cores are shared."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def hub(tmp_path):
    """An empty torch hub cache, in which a test may lay "downloaded" files."""
    before = torch.hub.get_dir()
    torch.hub.set_dir(str(tmp_path / "hub"))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    yield tmp_path / "hub" / "checkpoints"
    torch.hub.set_dir(before)


def resnet(classes: int = 3) -> nn.Module:
    return build_model("cifar_resnet20", num_classes=classes)


def make_run(path: Path, model: nn.Module, *, arch: str, classes: list[str]) -> Path:
    run, _ = Run.begin(path, stage="train", config={})
    save_weights(model.state_dict(), path / "weights.safetensors")
    preprocess = default_preprocess(arch, image_size=48).as_dict()
    block = {"arch": arch, "num_classes": len(classes), "classes": classes, "preprocess": preprocess}
    run.finish(seed=0, parents=[], model=block, metrics={})
    return path


def assert_equal_states(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# --- Building


@pytest.mark.parametrize("arch", FAMILIES)
def test_each_family_builds_fits_and_finds_its_blocks(arch):
    size, heads, blocks = FAMILIES[arch]
    # RegNet reads its widths from a tensor, which the meta device has no values for.
    with torch.device("cpu" if arch.startswith("regnet") else "meta"):
        model = build_model(arch, num_classes=7, input_size=size)
    check_input_size(model, size, arch, num_classes=7)
    assert head_names(model) == heads
    assert all(len(model.get_submodule(name).weight) == 7 for name in heads)
    if blocks:
        names = list(model.state_dict())
        assert enable_gradient_checkpointing(model) == blocks
        assert list(model.state_dict()) == names
    else:
        with pytest.raises(ModelError, match="has no stages of blocks to recompute"):
            enable_gradient_checkpointing(model)


def test_every_torchvision_classifier_is_offered():
    with torch.device("meta"):
        for name in ("vit_h_14", "wide_resnet101_2", "swin_v2_b", "convnext_large", "efficientnet_v2_l"):
            assert count_parameters(build_model(name, num_classes=2)) > 1e7


@pytest.mark.parametrize(("arch", "meant"), [("resnet5", "resnet50"), ("cifar_renset56", "cifar_resnet56")])
def test_an_unknown_name_suggests_a_near_one(arch, meant):
    with pytest.raises(ModelError) as info:
        build_model(arch, num_classes=2)
    assert f"there is no model '{arch}', did you mean '{meant}'? --model takes a torchvision" in str(info.value)


def test_an_unknown_name_without_a_near_one():
    with pytest.raises(ModelError, match=r"^there is no model 'zzzzqq'\. --model takes"):
        build_model("zzzzqq", num_classes=2)


def test_a_size_that_no_patch_divides():
    with pytest.raises(ModelError, match=r"vit_b_16 cannot take 100x100 images \(Input shape indivisible"):
        build_model("vit_b_16", num_classes=2, input_size=100)


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


def test_a_user_s_function(tmp_path, monkeypatch):
    (tmp_path / "mynet_a.py").write_text(
        "from torch import nn\n"
        "def small(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))\n"
        "def broken(num_classes):\n"
        "    raise KeyError('width')\n"
        "def deaf():\n"
        "    pass\n"
        "def text(num_classes):\n"
        "    return 'net'\n"
        "def flat(num_classes):\n"
        "    return nn.Conv2d(3, num_classes, 1)\n"
        "def pair(num_classes):\n"
        "    class Pair(nn.Linear):\n"
        "        def forward(self, x):\n"
        "            return {'logits': x}\n"
        "    return Pair(2, 2)\n"
        "def reads_values(num_classes):\n"
        "    class Net(nn.Sequential):\n"
        "        def forward(self, x):\n"
        "            return super().forward(x) * float(x.sum() == 0)\n"
        "    return Net(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))\n"
    )
    (tmp_path / "mynet_b.py").write_text("import no_such_package_xyz\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    model = build_model("mynet_a:small", num_classes=4)
    check_input_size(model, 8, "mynet_a:small", num_classes=4)
    assert default_preprocess("mynet_a:small", image_size=None).input_size == (3, 224, 224)
    assert count_macs(model, 8) == 3 * 8 * 8 * 4

    reader = build_model("mynet_a:reads_values", num_classes=4)
    check_input_size(reader, 8, "mynet_a:reads_values", num_classes=4)
    assert count_macs(reader, (3, 8, 8)) == 3 * 8 * 8 * 4

    for name, message in {
        "mynet_a:smal": r"'mynet_a' has no function 'smal', did you mean 'small'\?",
        "mynet_a:broken": r"broken\(num_classes=4\) failed: KeyError: 'width'\. It must take num_classes",
        "mynet_a:deaf": r"deaf\(num_classes=4\) failed: TypeError: .*keyword argument 'num_classes'",
        "mynet_a:text": r"text returned str, not a torch\.nn\.Module",
        "mynet_b:net": r"importing 'mynet_b' failed: .*No module named 'no_such_package_xyz'",
        "mynet_c:net": r"importing 'mynet_c' failed: ModuleNotFoundError",
    }.items():
        with pytest.raises(ModelError, match=message):
            build_model(name, num_classes=4)

    with pytest.raises(ModelError, match=r"returns \(2, 4, 8, 8\) for two images instead of \(2, 4\)"):
        check_input_size(build_model("mynet_a:flat", num_classes=4), 8, "mynet_a:flat", num_classes=4)
    with pytest.raises(ModelError, match="the network returned dict instead of a tensor of logits"):
        check_input_size(build_model("mynet_a:pair", num_classes=4), 8, "mynet_a:pair")
    with pytest.raises(ModelError, match=r"returns \(2, 4\) for two images instead of \(2, 5\)"):
        check_input_size(model, 8, "mynet_a:small", num_classes=5)


def test_timm_models():
    pytest.importorskip("timm", reason="needs the timm extra")
    model = build_model("timm:vit_tiny_patch16_224", num_classes=5, input_size=64)
    check_input_size(model, 64, "timm:vit_tiny_patch16_224", num_classes=5)
    assert head_names(model) == ("head",)
    assert {"cls_token", "pos_embed", "head.bias"} <= no_decay_names(model)
    assert enable_gradient_checkpointing(model) == 12
    preprocess = default_preprocess("timm:vit_tiny_patch16_224", image_size=None)
    assert (preprocess.input_size, preprocess.mean) == ((3, 224, 224), (0.5, 0.5, 0.5))
    assert (preprocess.interpolation, preprocess.crop_pct) == ("bicubic", 0.9)
    with pytest.raises(ModelError, match=r"timm has no model 'resnet1888', did you mean 'resnet"):
        build_model("timm:resnet1888", num_classes=2)
    with pytest.raises(ModelError, match=r"timm has no weights 'resnet18\.a1_in1'"):
        build_model("timm:resnet18.a1_in1", num_classes=2)
    with pytest.raises(ModelError, match="Give --weights DEFAULT with it"):
        load_weights(model, "a1_in1k", arch="timm:vit_tiny_patch16_224", classes=["a"] * 5)


def test_timm_missing_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelError, match=r"^a timm: model needs timm: pip install 'dsimg\[timm\]'$"):
        build_model("timm:resnet18", num_classes=2)


# --- Preprocess


@pytest.mark.parametrize(
    ("arch", "image_size", "weights", "side", "crop_pct", "interpolation"),
    [
        ("resnet50", None, None, 224, 0.875, "bilinear"),
        ("resnet50", 128, None, 128, 0.875, "bilinear"),
        ("resnet50", 64, None, 64, 1.0, "bilinear"),
        ("resnet50", None, "IMAGENET1K_V2", 224, 224 / 232, "bilinear"),
        ("resnet50", 160, "IMAGENET1K_V2", 160, 224 / 232, "bilinear"),
        ("vit_b_16", None, "ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1", 384, 1.0, "bicubic"),
        ("resnet50", None, "somewhere/weights.pth", 224, 0.875, "bilinear"),
        ("inception_v3", None, None, 299, 0.875, "bilinear"),
        ("cifar_resnet56", None, None, 32, 1.0, "bilinear"),
        ("cifar_resnet56", 96, None, 96, 1.0, "bilinear"),
    ],
)
def test_default_preprocess(arch, image_size, weights, side, crop_pct, interpolation):
    preprocess = default_preprocess(arch, image_size=image_size, weights=weights)
    assert preprocess.input_size == (3, side, side)
    assert preprocess.crop_pct == pytest.approx(crop_pct)
    assert preprocess.interpolation == interpolation


def test_googlenet_s_preprocess_equals_torchvision_s_transform_input():
    images = torch.rand(2, 3, 8, 8)
    usual = default_preprocess("resnet18", image_size=None)
    ours = default_preprocess("googlenet", image_size=None, weights="DEFAULT")
    model = build_model("googlenet", num_classes=2)
    model.transform_input = True  # what torchvision sets with its weights
    normalised = (images - torch.tensor(usual.mean).view(3, 1, 1)) / torch.tensor(usual.std).view(3, 1, 1)
    expected = model._transform_input(normalised)
    torch.testing.assert_close((images - torch.tensor(ours.mean).view(3, 1, 1)) / 0.5, expected)
    assert ours.std == (0.5, 0.5, 0.5)
    assert not build_model("inception_v3", num_classes=2).transform_input


def test_a_run_s_preprocess_is_inherited(tmp_path):
    path = make_run(tmp_path / "run", resnet(), arch="cifar_resnet20", classes=["a", "b", "c"])
    assert default_preprocess("cifar_resnet20", image_size=None, weights=str(path)).input_size == (3, 48, 48)
    assert default_preprocess("cifar_resnet20", image_size=40, weights=str(path)).input_size == (3, 40, 40)


# --- Weights


def test_save_and_read_round_trip(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    state = {
        "whole": whole,
        "again": whole,
        "part": whole[1:],
        "transposed": whole.t(),
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.zeros(0),
    }
    path = tmp_path / "weights.safetensors"
    save_weights(state, path)
    assert_equal_states(read_weights(path), state)
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.safetensors"]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    save_weights({"a": torch.ones(2)}, path)

    def fail(tensors, filename, metadata):
        Path(filename).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", fail)
    with pytest.raises(ModelError, match=r"cannot write .*No space left on device"):
        save_weights({"a": torch.zeros(2)}, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights.safetensors"]
    assert torch.equal(read_weights(path)["a"], torch.ones(2))


def test_reading_what_is_no_safetensors_file(tmp_path):
    with pytest.raises(ModelError, match=r"none\.safetensors does not exist"):
        read_weights(tmp_path / "none.safetensors")
    path = tmp_path / "cut.safetensors"
    save_weights({"a": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ModelError, match=r"cut\.safetensors is not a whole safetensors file"):
        read_weights(path)


def test_restore_is_exact_or_refused():
    source, target = resnet(), resnet()
    nn.init.ones_(source.fc.bias)
    restore_weights(target, source.state_dict(), source="w")
    assert_equal_states(target.state_dict(), source.state_dict())
    state = source.state_dict()
    state["extra"] = state.pop("fc.bias")
    state["conv1.weight"] = torch.zeros(1)
    with pytest.raises(ModelError) as info:
        restore_weights(target, state, source="w")
    assert str(info.value).startswith(
        "w does not fit the network: fc.bias is missing, extra is unknown, conv1.weight has shape (1,) instead of "
        "(16, 3, 3, 3)."
    )


def test_restore_takes_mnasnet_without_version_metadata(tmp_path):
    model = build_model("mnasnet0_5", num_classes=2)
    save_weights(model.state_dict(), tmp_path / "w.safetensors")
    restore_weights(build_model("mnasnet0_5", num_classes=2), read_weights(tmp_path / "w.safetensors"), source="w")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3, "rng": torch.zeros(4)},
        lambda state: {"model": {f"module.{name}": value for name, value in state.items()}, "optimizer": {}},
        lambda state: {"model": {}, "model_ema": {"n_averaged": torch.tensor(1), **state}},
        lambda state: {"state_dict": {f"model._orig_mod.{name}": value for name, value in state.items()}},
        lambda state: {"module": state, "args": argparse.Namespace(lr=0.1, opt="sgd")},
    ],
)
def test_a_pth_file_with_the_usual_wrappers(tmp_path, wrap):
    source, target = resnet(), resnet()
    torch.save(wrap(source.state_dict()), tmp_path / "w.pth")
    report = load_weights(target, str(tmp_path / "w.pth"), arch="cifar_resnet20", classes=["a", "b", "c"])
    assert report.loaded == len(source.state_dict())
    assert report.new == ()
    assert_equal_states(target.state_dict(), source.state_dict())
    assert report.head == "kept (3 classes; the source does not name them, so check their order)"


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": resnet().state_dict(), "extra": Evil()}, "evil.pth")
    with pytest.raises(ModelError, match=r"evil\.pth needs code to be run on loading \(.*\), which is refused"):
        load_weights(resnet(), "evil.pth", arch="cifar_resnet20", classes=["a", "b", "c"])
    assert not Path("ran").exists()
    torch.save(resnet(), "model.pth")
    with pytest.raises(ModelError, match=r"\(dsimg\.cifar_resnet\.CifarResNet\), which is refused"):
        load_weights(resnet(), "model.pth", arch="cifar_resnet20", classes=["a", "b", "c"])


@pytest.mark.parametrize("content", [b"", b"not a file of weights", b"PK\x03\x04broken"])
def test_a_damaged_pth_file(tmp_path, content):
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(ModelError, match=r"w\.pth is not a whole PyTorch file"):
        load_weights(resnet(), str(tmp_path / "w.pth"), arch="cifar_resnet20", classes=["a", "b", "c"])


def test_a_pth_file_without_a_state_dict(tmp_path):
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "w.pth")
    with pytest.raises(ModelError, match=r"holds no state dict \(found: epoch, lr\)"):
        load_weights(resnet(), str(tmp_path / "w.pth"), arch="cifar_resnet20", classes=["a", "b", "c"])


def test_the_head_stays_new_when_class_counts_differ(tmp_path):
    source, target = resnet(10), resnet(3)
    fresh = target.fc.weight.detach().clone()
    save_weights(source.state_dict(), tmp_path / "w.safetensors")
    report = load_weights(target, str(tmp_path / "w.safetensors"), arch="cifar_resnet20", classes=["a", "b", "c"])
    assert report.loaded == len(source.state_dict()) - 2
    assert report.skipped == (("fc.bias", "head"), ("fc.weight", "head"))
    assert report.new == ("fc.weight", "fc.bias")
    assert torch.equal(target.fc.weight, fresh)
    assert torch.equal(target.conv1.weight, source.conv1.weight)
    assert str(report) == (
        f"{tmp_path}/w.safetensors: {report.loaded} tensors loaded; head new (10 classes there, 3 here); skipped "
        "fc.bias (head), fc.weight (head); new fc.weight, fc.bias."
    )


def test_auxiliary_heads_are_replaced_too(tmp_path):
    source, target = build_model("googlenet", num_classes=9), build_model("googlenet", num_classes=2)
    save_weights(source.state_dict(), tmp_path / "w.safetensors")
    report = load_weights(target, str(tmp_path / "w.safetensors"), arch="googlenet", classes=["a", "b"])
    heads = {f"{head}.{part}" for head in ("fc", "aux1.fc2", "aux2.fc2") for part in ("weight", "bias")}
    assert set(report.new) == heads
    assert {name for name, _ in report.skipped} == heads


def test_other_weights(tmp_path):
    save_weights({"encoder.weight": torch.ones(2)}, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"nothing in it fits this network\. It holds encoder\.weight; the network"):
        load_weights(resnet(), str(tmp_path / "w.safetensors"), arch="cifar_resnet20", classes=["a", "b", "c"])
    state = resnet().state_dict() | {"stray": torch.ones(1), "conv1.weight": torch.ones(16, 1, 3, 3)}
    save_weights(state, tmp_path / "w.safetensors")
    report = load_weights(resnet(), str(tmp_path / "w.safetensors"), arch="cifar_resnet20", classes=["a", "b", "c"])
    assert set(report.skipped) == {
        ("conv1.weight", "shape (16, 1, 3, 3) there, (16, 3, 3, 3) here"),
        ("stray", "not in this network"),
    }
    assert report.new == ("conv1.weight",)


def test_a_run_s_head_follows_the_class_names(tmp_path):
    source = resnet()
    path = str(make_run(tmp_path / "run", source, arch="cifar_resnet20", classes=["ant", "bee", "cat"]))

    same = resnet()
    report = load_weights(same, path, arch="cifar_resnet20", classes=["ant", "bee", "cat"])
    assert report.head == "kept (the same classes)"
    assert_equal_states(same.state_dict(), source.state_dict())

    turned = resnet()
    report = load_weights(turned, path, arch="cifar_resnet20", classes=["cat", "ant", "bee"])
    assert report.head == "kept, in this run's order of classes"
    assert torch.equal(turned.fc.weight, source.fc.weight[[2, 0, 1]])
    assert torch.equal(turned.fc.bias, source.fc.bias[[2, 0, 1]])

    other = resnet()
    fresh = other.fc.weight.detach().clone()
    report = load_weights(other, path, arch="cifar_resnet20", classes=["ant", "bee", "dog"])
    assert report.head == "new (3 classes with other names there)"
    assert torch.equal(other.fc.weight, fresh)


def test_a_run_of_another_arch_or_none(tmp_path):
    path = make_run(tmp_path / "run", resnet(), arch="cifar_resnet20", classes=["a", "b", "c"])
    with pytest.raises(ModelError, match=r"holds a cifar_resnet20, but --model is cifar_resnet32"):
        load_weights(resnet(), str(path), arch="cifar_resnet32", classes=["a", "b", "c"])
    weights = path / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(RunError, match="is damaged"):
        load_weights(resnet(), str(path), arch="cifar_resnet20", classes=["a", "b", "c"])
    with pytest.raises(RunError, match="is not a run folder"):
        load_weights(resnet(), str(tmp_path), arch="cifar_resnet20", classes=["a", "b", "c"])


@pytest.mark.parametrize(
    ("arch", "weights", "message"),
    [
        ("cifar_resnet20", "DEFAULT", "cifar_resnet20 has no published weights called 'DEFAULT'"),
        ("cifar_resnet20", "no/such", "no/such: no such file or folder"),
        ("cifar_resnet20", "none.pth", r"none\.pth: no such file or folder"),
        ("resnet50", "IMAGENET1K_V3", "did you mean 'IMAGENET1K_V"),
        ("resnet50", "ResNet18_Weights.IMAGENET1K_V1", "it: IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT"),
    ],
)
def test_weights_that_do_not_exist(arch, weights, message):
    with pytest.raises(ModelError, match=message):
        load_weights(resnet(), weights, arch=arch, classes=["a", "b", "c"])


def test_torchvision_weights_by_name(hub):
    published = torchvision.models.resnet18(num_classes=1000)
    torch.save(published.state_dict(), hub / "resnet18-f37072fd.pth")
    model = build_model("resnet18", num_classes=3)
    for name in ("DEFAULT", "IMAGENET1K_V1", "ResNet18_Weights.IMAGENET1K_V1"):
        nn.init.zeros_(model.conv1.weight)
        report = load_weights(model, name, arch="resnet18", classes=["a", "b", "c"])
        assert report.new == ("fc.weight", "fc.bias")
        assert report.head == "new (1000 classes there, 3 here)"
        assert torch.equal(model.conv1.weight, published.conv1.weight)

    # ImageNet's folders are WordNet ids in torchvision's order; 1,000 other classes are not.
    model = build_model("resnet18", num_classes=1000)
    ids = [f"n{i:08d}" for i in range(1000)]
    assert load_weights(model, "DEFAULT", arch="resnet18", classes=ids).head == "kept (ImageNet's classes)"
    report = load_weights(model, "DEFAULT", arch="resnet18", classes=[f"thing {i}" for i in range(1000)])
    assert report.head == "new (1000 classes with other names there)"


def test_old_names_in_published_files(tmp_path):
    model = build_model("densenet121", num_classes=2)
    state = model.state_dict()
    old = {name.replace(".norm1.", ".norm.1.").replace(".conv2.", ".conv.2."): t for name, t in state.items()}
    assert len(old.keys() - state.keys()) == 58 * 6
    torch.save(old, tmp_path / "w.pth")
    assert load_weights(model, str(tmp_path / "w.pth"), arch="densenet121", classes=["a", "b"]).new == ()


def test_vit_positions_are_resampled(tmp_path):
    def small_vit(image_size: int) -> nn.Module:
        sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16, "num_classes": 2}
        return VisionTransformer(image_size=image_size, patch_size=32, **sizes)

    source = small_vit(64)
    nn.init.normal_(source.heads.head.weight)
    state = source.state_dict()
    old = {
        name.replace(".mlp.0.", ".mlp.linear_1.").replace(".mlp.3.", ".mlp.linear_2."): t for name, t in state.items()
    }
    assert len(old.keys() - state.keys()) == 2 * 4
    torch.save(old, tmp_path / "w.pth")
    target = small_vit(96)
    report = load_weights(target, str(tmp_path / "w.pth"), arch="vit_b_32", classes=["a", "b"])
    assert (report.new, report.skipped) == ((), ())
    ours, theirs = target.encoder.pos_embedding, source.encoder.pos_embedding
    assert ours.shape == (1, 1 + 9, 8)
    assert torch.equal(ours[:, 0], theirs[:, 0])  # the class token's position
    torch.testing.assert_close(ours[:, [1, 3, 7, 9]], theirs[:, 1:])  # the corners
    assert target(torch.rand(1, 3, 96, 96)).shape == (1, 2)


def test_no_network(hub, monkeypatch, capfd):
    def refuse(*args, **kwargs):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    with pytest.raises(ModelError) as info:
        load_weights(build_model("resnet18", num_classes=2), "DEFAULT", arch="resnet18", classes=["a", "b"])
    assert "cannot download https://download.pytorch.org/models/resnet18-f37072fd.pth" in str(info.value)
    assert "Name or service not known" in str(info.value)
    assert f"put it into {hub}." in str(info.value)


# --- Outputs


def test_split_outputs():
    logits, one, two = torch.zeros(2, 3), torch.ones(2, 3), torch.full((2, 3), 2.0)
    assert split_outputs(logits) == (logits, ())
    main, aux = split_outputs(GoogLeNetOutputs(logits, two, one))
    assert main is logits
    assert [(tensor.mean().item(), weight) for tensor, weight in aux] == [(1.0, 0.3), (2.0, 0.3)]
    main, aux = split_outputs(InceptionOutputs(logits, one))
    assert main is logits
    assert [(tensor.mean().item(), weight) for tensor, weight in aux] == [(1.0, 0.4)]
    assert split_outputs(InceptionOutputs(logits, None)) == (logits, ())
    assert primary_logits(GoogLeNetOutputs(logits, two, one)) is logits
    with pytest.raises(ModelError, match="the network returned list instead of a tensor"):
        split_outputs([logits])


@pytest.mark.parametrize(("arch", "size", "aux"), [("googlenet", 64, 2), ("inception_v3", 299, 1)])
def test_auxiliary_outputs_only_in_train_mode(arch, size, aux):
    with torch.device("meta"):
        model, images = build_model(arch, num_classes=3), torch.rand(2, 3, size, size)
    logits, extra = split_outputs(model(images))
    assert logits.shape == (2, 3)
    assert [tensor.shape for tensor, _ in extra] == [(2, 3)] * aux
    assert split_outputs(model.eval()(images))[1] == ()


# --- Sizes


@pytest.mark.parametrize(
    ("arch", "size", "works"),
    [("alexnet", 32, 64), ("vgg11_bn", 16, 32), ("inception_v3", 160, 299), ("densenet121", 16, 32)],
)
def test_too_small_an_image(arch, size, works):
    with torch.device("meta"):
        model = build_model(arch, num_classes=2)
    with pytest.raises(ModelError) as info:
        check_input_size(model, size, arch)
    message = str(info.value)
    assert message.startswith(f"{arch} cannot take {size}x{size} images (")
    assert message.endswith(f"Use --image_size {works}, or a network for small images such as cifar_resnet20.")
    check_input_size(model, works, arch, num_classes=2)


def test_a_vit_of_another_size():
    with torch.device("meta"):
        model = build_model("vit_b_32", num_classes=2, input_size=224)
    with pytest.raises(ModelError, match=r"vit_b_32 cannot take 96x96 images .*Use --image_size 224"):
        check_input_size(model, 96, "vit_b_32")
    with pytest.raises(ModelError, match=r"vit_b_32 cannot take 256x256 images .*Use another --image_size"):
        check_input_size(model, 256, "vit_b_32")


def test_checking_and_counting_change_nothing():
    model = resnet()
    model.layer1.eval()
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    random = torch.get_rng_state()
    check_input_size(model, 32, "cifar_resnet20")
    count_macs(model, 32)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert_equal_states(model.state_dict(), state)


@pytest.mark.parametrize("arch", ["resnet18", "vit_b_32", "swin_t", "googlenet", "regnet_y_400mf", "efficientnet_b0"])
def test_macs_and_parameters_are_those_torchvision_publishes(arch):
    meta = torchvision.models.get_model_weights(arch).DEFAULT.meta
    model = build_model(arch, num_classes=1000)
    assert count_macs(model, 224) / 1e9 == pytest.approx(meta["_ops"], abs=6e-4)
    if arch != "googlenet":  # its published count is without the auxiliary heads
        assert count_parameters(model) == meta["num_params"]


def test_macs_of_a_cifar_resnet():
    stem, narrow, widen = 3 * 9 * 16 * 32 * 32, 16 * 9 * 16 * 32 * 32, 16 * 9 * 32 * 16 * 16
    # Each stage's convolution costs the same, as width doubles when the area is quartered; the two that widen half.
    assert count_macs(resnet(10), (3, 32, 32)) == stem + 16 * narrow + 2 * widen + 64 * 10


# --- Training


def test_has_batchnorm():
    assert has_batchnorm(resnet())
    with torch.device("meta"):
        assert not has_batchnorm(build_model("vit_b_32", num_classes=2))


def test_no_decay_names():
    assert no_decay_names(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))) == {
        "0.bias",
        "1.weight",
        "1.bias",
        "2.bias",
    }
    with torch.device("meta"):
        spared = no_decay_names(build_model("vit_b_32", num_classes=2))
    assert {"class_token", "encoder.pos_embedding", "encoder.ln.weight"} <= spared
    assert "encoder.layers.encoder_layer_0.self_attention.in_proj_bias" in spared
    assert "encoder.layers.encoder_layer_0.self_attention.in_proj_weight" not in spared
    with torch.device("meta"):
        assert "features.1.0.attn.relative_position_bias_table" in no_decay_names(build_model("swin_t", num_classes=2))
        convnext = no_decay_names(build_model("convnext_tiny", num_classes=2))
    assert "features.1.0.layer_scale" in convnext
    assert "features.1.0.block.0.weight" not in convnext  # a depthwise convolution


def test_parameter_groups_hold_every_trainable_parameter_once():
    model = resnet()
    model.conv1.requires_grad_(False)
    decayed, spared = parameter_groups(model, 5e-4)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (5e-4, 0.0)
    ids = [id(parameter) for group in (decayed, spared) for parameter in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert all(parameter.ndim >= 2 for parameter in decayed["params"])
    assert len(decayed["params"]) == 19  # 18 convolutions in blocks and the linear layer
    assert [len(group["params"]) for group in parameter_groups(nn.BatchNorm2d(3), 0.1)] == [2]


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
