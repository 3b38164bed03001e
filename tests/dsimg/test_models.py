"""dsimg.models: each network that a name can mean, and what is known of it before training."""

import copy
import sys

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models import GoogLeNetOutputs, InceptionOutputs

from dsimg.errors import ModelError
from dsimg.models import (
    build_model,
    check_input_size,
    count_macs,
    count_parameters,
    default_preprocess,
    has_batchnorm,
    head_names,
    no_decay_names,
    parameter_groups,
    primary_logits,
    split_outputs,
)
from tests.dsimg.model_cases import assert_equal_states, make_run, resnet

# One network of each torchvision family: side in pixels, head modules.
FAMILIES = {
    "alexnet": (64, ("classifier.6",)),
    "convnext_tiny": (64, ("classifier.2",)),
    "densenet121": (32, ("classifier",)),
    "efficientnet_b0": (32, ("classifier.1",)),
    "googlenet": (64, ("fc", "aux1.fc2", "aux2.fc2")),
    "inception_v3": (299, ("fc", "AuxLogits.fc")),
    "maxvit_t": (224, ("classifier.5",)),
    "mnasnet0_5": (32, ("classifier.1",)),
    "mobilenet_v2": (32, ("classifier.1",)),
    "mobilenet_v3_small": (32, ("classifier.3",)),
    "regnet_y_400mf": (32, ("fc",)),
    "resnet18": (32, ("fc",)),
    "shufflenet_v2_x0_5": (32, ("fc",)),
    "squeezenet1_1": (32, ("classifier.1",)),
    "swin_t": (64, ("head",)),
    "vgg11_bn": (32, ("classifier.6",)),
    "vit_b_16": (64, ("heads.head",)),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# --- Building


@pytest.mark.parametrize("arch", FAMILIES)
def test_each_family_builds_fits_and_finds_its_heads(arch):
    size, heads = FAMILIES[arch]
    # RegNet reads its widths from a tensor, which the meta device has no values for.
    with torch.device("cpu" if arch.startswith("regnet") else "meta"):
        model = build_model(arch, num_classes=7, input_size=size)
    check_input_size(model, size, arch, num_classes=7)
    assert head_names(model) == heads
    assert all(len(model.get_submodule(name).weight) == 7 for name in heads)


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
    preprocess = default_preprocess("timm:vit_tiny_patch16_224", image_size=None)
    assert (preprocess.input_size, preprocess.mean) == ((3, 224, 224), (0.5, 0.5, 0.5))
    assert (preprocess.interpolation, preprocess.crop_pct) == ("bicubic", 0.9)
    with pytest.raises(ModelError, match=r"timm has no model 'resnet1888', did you mean 'resnet"):
        build_model("timm:resnet1888", num_classes=2)
    with pytest.raises(ModelError, match=r"timm has no weights 'resnet18\.a1_in1'"):
        build_model("timm:resnet18.a1_in1", num_classes=2)


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
