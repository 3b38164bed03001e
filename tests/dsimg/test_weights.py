"""dsimg.weights: from files, runs and names into a network, and back to disk."""

import argparse
import urllib.error
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn
from torchvision.models import VisionTransformer

from dsimg.errors import ModelError, RunError
from dsimg.models import build_model
from dsimg.weights import load_weights, read_weights, restore_weights, save_weights
from tests.dsimg.model_cases import assert_equal_states, make_run, resnet


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def hub(tmp_path):
    """An empty torch hub cache, in which a test may lay "downloaded" files."""
    before = torch.hub.get_dir()
    torch.hub.set_dir(str(tmp_path / "hub"))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    yield tmp_path / "hub" / "checkpoints"
    torch.hub.set_dir(before)


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


def test_timm_weights_are_chosen_by_the_model_s_name():
    pytest.importorskip("timm", reason="needs the timm extra")
    arch = "timm:vit_tiny_patch16_224"
    with pytest.raises(ModelError, match="Give --weights DEFAULT with it"):
        load_weights(build_model(arch, num_classes=5), "a1_in1k", arch=arch, classes=["a"] * 5)


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
