"""dsimg.attention: what can be cut in ViT, Swin and MaxViT, and that what is cut is exactly that."""

import copy
import time

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import MaxVit, SwinTransformer, VisionTransformer, resnet18
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2
from torchvision.models.vision_transformer import ConvStemConfig

from dsimg.attention import attributes, units
from dsimg.models import build_model, count_macs
from dsimg.pruned import Record, cut, rebuild

SIDE = 32


def make_vit(**options):
    return VisionTransformer(
        image_size=SIDE, patch_size=16, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=5, **options
    )


def make_stem_vit():
    stem = [ConvStemConfig(8, 3, 4), ConvStemConfig(16, 3, 4)]
    return make_vit(conv_stem_configs=stem, representation_size=24)


def make_swin(**options):
    sizes = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": [4, 4], "num_classes": 5}
    return SwinTransformer(patch_size=[4, 4], **sizes, **options)


def make_swin_v2():
    return make_swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)


def make_maxvit():
    sizes = {"stem_channels": 8, "block_channels": [16, 32], "block_layers": [2, 1], "head_dim": 8}
    return MaxVit(input_size=(SIDE, SIDE), partition_size=4, stochastic_depth_prob=0.0, num_classes=5, **sizes)


MAKERS = {"vit": make_vit, "stem_vit": make_stem_vit, "swin": make_swin, "swin_v2": make_swin_v2, "maxvit": make_maxvit}
HEAD = {"vit": "heads.head", "stem_vit": "heads.head", "swin": "head", "swin_v2": "head", "maxvit": "classifier.5"}


def make(family, *, seed=0):
    """Return a small network without a zero or a one in it: a fresh ViT answers 0 to everything."""
    torch.manual_seed(seed)
    model = MAKERS[family]()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif tensor.is_floating_point() and not name.endswith("relative_coords_table"):
                tensor.normal_(std=0.1)
    return model.eval()


def images(number=2):
    return torch.randn(number, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def logits(model, number=2):
    with torch.no_grad():
        return model(images(number))


def half(unit):
    """Every other channel, beginning with the second."""
    return np.arange(unit.channels)[1::2]


def everything(unit):
    return np.arange(unit.channels)


@pytest.fixture(params=MAKERS)
def family(request):
    return request.param


# --- Units


def test_the_units_of_a_vit():
    found, notes = units(make("stem_vit"))
    assert [(unit.name, unit.kind, unit.channels, unit.width) for unit in found] == [
        ("encoder", "heads of encoder", 4, 8),
        ("heads.pre_logits", "pre_logits", 24, 1),
        ("encoder.layers.encoder_layer_0.mlp.0", "mlp", 64, 1),
        ("encoder.layers.encoder_layer_1.mlp.0", "mlp", 64, 1),
    ]
    assert notes == [
        "The size of an attention head stays 8: heads are cut whole, each with 8 channels of the width between the "
        "layers.",
        "The convolutions before conv_proj.conv_last are not cut.",
    ]


def test_the_units_of_a_swin():
    found, notes = units(make("swin"))
    assert [(unit.name, unit.kind, unit.channels, unit.width) for unit in found] == [
        ("features.1", "heads of features.1", 2, 8),
        ("features.3", "heads of features.3", 4, 8),
        ("features.1.0.mlp.0", "mlp", 64, 1),
        ("features.1.1.mlp.0", "mlp", 64, 1),
        ("features.3.0.mlp.0", "mlp", 128, 1),
    ]
    assert len(notes) == 1
    assert "cpb_mlp" in units(make("swin_v2"))[1][1]


def test_the_units_of_a_maxvit():
    found, notes = units(make("maxvit"))
    assert [(unit.name, unit.channels, unit.width) for unit in found if unit.kind not in ("mlp", "mbconv")] == [
        ("stem.1.0", 8, 1),
        ("blocks.0", 2, 8),
        ("blocks.1", 4, 8),
        ("stem.0.0", 8, 1),
        ("classifier.3", 32, 1),
    ]
    assert [unit.channels for unit in found if unit.kind == "mbconv"] == [64, 64, 128]
    assert [unit.channels for unit in found if unit.kind == "mlp"] == [64, 64, 64, 64, 128, 128]
    assert "squeeze widths" in notes[1]


def test_no_position_is_in_two_units(family):
    model = make(family)
    state, seen = model.state_dict(), set()
    for unit in units(model)[0]:
        for part in unit.slices:
            assert len(part.index) == unit.channels
            assert part.index.size == state[part.tensor].shape[part.dim]
            places = {(part.tensor, part.dim, int(position)) for position in part.index.flat}
            assert len(places) == part.index.size
            assert not places & seen
            seen |= places
    assert (f"{HEAD[family]}.weight", 0, 0) not in seen
    assert (f"{HEAD[family]}.weight", 1, 0) in seen


def test_weak_heads_are_paired_with_weak_channels():
    model = make_vit()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
        layers = model.encoder.layers
        for layer, head in ((layers[0], 2), (layers[1], 1)):
            layer.self_attention.out_proj.weight[:, 8 * head : 8 * head + 8] = 0.5
        layers[0].mlp[3].weight[3:27:3] = 0.5  # writes little to the channels 3, 6 … 24
    heads = units(model)[0][0]
    weakest = {(part.tensor, part.dim): part.index[0].tolist() for part in heads.slices}
    layer = "encoder.layers.encoder_layer_{}.self_attention.{}"
    assert weakest["class_token", 2] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert weakest[layer.format(0, "in_proj_weight"), 1] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert weakest[layer.format(0, "out_proj.weight"), 1] == list(range(16, 24))
    assert weakest[layer.format(1, "out_proj.weight"), 1] == list(range(8, 16))
    rows = [*range(8, 16), *range(40, 48), *range(72, 80)]
    assert weakest[layer.format(1, "in_proj_weight"), 0] == weakest[layer.format(1, "in_proj_bias"), 0] == rows


def test_without_weights_the_pairs_go_by_number(family):
    for unit in units(make(family).to("meta"))[0]:
        for part in unit.slices:
            assert (np.diff(part.index, axis=0) == np.diff(part.index, axis=0)[0, 0]).all()


def test_a_stage_with_a_single_head_is_left_alone():
    model = make("swin")
    found, _ = units(model)
    cut(model, found[:1], [np.array([1])])
    found, notes = units(model)
    assert [unit.name for unit in found][:2] == ["features.3", "features.1.0.mlp.0"]
    assert notes[1:] == ["features.1 has a single head, so its width is not cut."]


def test_other_networks_have_no_such_units():
    assert units(resnet18()) == ([], [])


# --- Cut


def test_each_unit_alone(family):
    whole = make(family)
    shapes = {name: list(tensor.shape) for name, tensor in whole.state_dict().items()}
    for number, unit in enumerate(units(whole)[0]):
        model = copy.deepcopy(whole)
        found, _ = units(model)
        cut(model, found, [half(u) if n == number else everything(u) for n, u in enumerate(found)])
        expected = copy.deepcopy(shapes)
        for part in unit.slices:
            expected[part.tensor][part.dim] = part.index[half(unit)].size
        assert {name: list(tensor.shape) for name, tensor in model.state_dict().items()} == expected
        assert logits(model, 1).shape == (1, 5)
        assert logits(model, 2).isfinite().all()


def test_a_channel_cut_is_a_channel_silenced(family):
    """Exactly, but for LayerNorms, which see the width: without them, zeros at the lost places give the same logits."""
    whole = make(family).double()
    for module in list(whole.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, nn.Identity())
    pixels = images().double()
    with torch.no_grad():
        before = whole(pixels)
        for unit in units(whole)[0]:
            silenced, narrow = copy.deepcopy(whole), copy.deepcopy(whole)
            lost = np.setdiff1d(everything(unit), half(unit))
            for part in unit.slices:
                silenced.state_dict()[part.tensor].index_fill_(part.dim, torch.from_numpy(part.index[lost].ravel()), 0)
            cut(narrow, [unit], [half(unit)])
            expected = silenced(pixels)
            assert not torch.allclose(expected, before, rtol=1e-3)
            torch.testing.assert_close(narrow(pixels), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", ["swin", "swin_v2"])
def test_patch_merging_keeps_the_same_channels_of_all_four_pixels(family):
    model = make(family)
    found = units(model)[0][:2]
    record = cut(model, found, [half(unit) for unit in found])
    stream = record.kept["features.0.0.weight"][0]
    expected = np.concatenate([stream + 16 * pixel for pixel in range(4)])
    assert record.kept["features.2.reduction.weight"][1].tolist() == expected.tolist()
    written = record.kept["features.2.reduction.weight"][0]
    assert written.tolist() == record.kept["head.weight"][1].tolist()
    normed = expected if family == "swin" else written  # before the reduction, or after it
    assert record.kept["features.2.norm.weight"][0].tolist() == normed.tolist()
    assert model.features[2].norm.normalized_shape == [len(normed)]


def test_a_fresh_network_is_narrowed_to_the_same_bits(family):
    model = make(family)
    found, _ = units(model)
    record = cut(model, found, [half(unit) for unit in found])
    again, _ = units(model)  # cut what has been cut
    record = cut(model, again, [half(unit) for unit in again], before=record)
    fresh = make(family, seed=1)
    rebuild(fresh, Record.from_dict(record.as_dict()))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh), logits(model))
    assert count_macs(fresh, SIDE) == count_macs(model, SIDE)
    loss = fresh.train()(images()).square().mean()
    loss.backward()
    assert all(parameter.grad is not None for parameter in fresh.parameters())


# --- Attributes


def test_attributes_follow_from_the_tensors():
    expected = {
        "vit": [("", {"hidden_dim": 16}), ("encoder.layers.encoder_layer_0.self_attention", None)],
        "swin": [("features.1.0.attn", {"num_heads": 1}), ("features.3.0.attn", {"num_heads": 2})],
        "swin_v2": [("features.1.0.attn", {"num_heads": 1}), ("features.3.0.attn", {"num_heads": 2})],
        "maxvit": [("blocks.1.layers.0.layers.window_attention.attn_layer.1", {"n_heads": 2})],
    }
    expected["vit"][1] = (expected["vit"][1][0], {"embed_dim": 16, "kdim": 16, "vdim": 16, "num_heads": 2})
    for family, modules in expected.items():
        model = make(family)
        found, _ = units(model)
        cut(model, found, [half(unit) for unit in found])
        for name, values in modules:
            module = model.get_submodule(name)
            assert attributes(module) == values
            assert {key: getattr(module, key) for key in values} == values


def test_other_modules_have_no_such_attributes():
    modules = [nn.Linear(4, 4), nn.LayerNorm(4), nn.MultiheadAttention(4, 2, kdim=3), resnet18()]
    assert [attributes(module) for module in modules] == [{}, {}, {}, {}]


# --- The published sizes


def test_a_subclass_is_not_taken_for_its_family():
    """It may read its tensors in other ways; the graph looks at what it does."""

    class Mine(VisionTransformer):
        pass

    model = Mine(image_size=32, patch_size=16, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=3)
    assert units(model) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["vit_b_16", "vit_b_32", "swin_t", "swin_v2_t", "maxvit_t"])
def test_half_of_each_unit(arch):
    model = build_model(arch, num_classes=10).eval()
    before = count_macs(model, 224)
    start = time.monotonic()
    found, _ = units(model)
    seconds = time.monotonic() - start
    cut(model, found, [np.arange(unit.channels)[: unit.channels // 2] for unit in found])
    share = count_macs(model, 224) / before
    print(f"{arch}: {len(found)} units in {seconds:.2f} s, {share:.3f} of {before / 1e9:.2f} GMACs")
    assert seconds < 10
    assert share < 0.5
    with torch.no_grad():
        assert model(torch.randn(2, 3, 224, 224)).shape == (2, 10)
