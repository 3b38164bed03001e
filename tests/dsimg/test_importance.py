import numpy as np
import pytest
import torch
from torch import nn

from dsimg.channels import Slice, Unit
from dsimg.importance import IMPORTANCES, scores


def rows(*lists):
    return np.array(lists, dtype=np.int64)


def net():
    """Return conv -> norm -> linear over 3 channels of 1x1 pixels, with weights that are easy to square."""
    model = nn.Sequential(nn.Conv2d(2, 3, 1, bias=True), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 3.0]])[:, :, None, None])  # squares 1, 2, 9
        model[0].bias.fill_(100.0)
        model[1].weight.copy_(torch.tensor([-3.0, 1.0, 2.0]))  # squares 9, 1, 4
        model[1].running_mean.fill_(50.0)
        model[3].weight.copy_(torch.tensor([[1.0, 0.0, 2.0], [1.0, 0.0, 0.0]]))  # by column 2, 0, 4
    return model


def unit(*, name="0"):
    one_each = rows([0], [1], [2])
    tensors = [("0.weight", 0), ("0.bias", 0), ("1.weight", 0), ("1.bias", 0), ("1.running_mean", 0), ("3.weight", 1)]
    return Unit(name, "conv", 3, tuple(Slice(tensor, dim, one_each) for tensor, dim in tensors))


def score(model, *units, importance, seed=0, gradients=None):
    return scores(model, units, importance=importance, seed=seed, gradients=gradients)


def test_group_norm_gives_each_slice_the_same_say():
    # By slice, over its mean: (1, 2, 9) / 4, (9, 1, 4) / (14 / 3), (2, 0, 4) / 2; biases and statistics do not count.
    expected = (np.array([1, 2, 9]) / 4 + np.array([9, 1, 4]) * 3 / 14 + np.array([2, 0, 4]) / 2) / 3
    (actual,) = score(net(), unit(), importance="group_norm")
    np.testing.assert_allclose(actual, expected)
    assert actual.dtype == np.float64
    assert actual.mean() == pytest.approx(1)


def test_group_norm_is_blind_to_a_slice_s_scale_and_to_silent_slices():
    model, scaled = net(), net()
    with torch.no_grad():
        scaled[0].weight.mul_(1000)
    np.testing.assert_allclose(
        score(scaled, unit(), importance="group_norm"), score(model, unit(), importance="group_norm")
    )
    with torch.no_grad():
        model[0].weight.zero_()
        model[1].weight.zero_()
    np.testing.assert_allclose(score(model, unit(), importance="group_norm")[0], [1, 0, 2])
    with torch.no_grad():
        model[3].weight.zero_()
    np.testing.assert_array_equal(score(model, unit(), importance="group_norm")[0], [0, 0, 0])


def test_a_channel_of_several_positions_is_scored_as_a_whole():
    model = nn.Sequential(nn.Linear(1, 4, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    heads = Unit("0", "head", 2, (Slice("0.weight", 0, rows([0, 3], [1, 2])),), width=2)
    np.testing.assert_allclose(score(model, heads, importance="group_norm")[0], np.array([17, 13]) / 15)
    gradients = {"0.weight": torch.tensor([[1.0], [1.0], [-1.0], [1.0]])}
    np.testing.assert_allclose(score(model, heads, importance="taylor", gradients=gradients)[0], [5, 1])


def test_taylor_sums_the_first_order_change_of_each_slice():
    model = net()
    gradients = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    gradients["3.weight"][1] = -1.0
    # |sum w g|: weight 1, 2, 3; bias 100 each; scale |-3|, 1, 2; shift 0; linear |1 - 1|, 0, |2 - 0|.
    expected = np.array([1, 2, 3]) + 100 + np.array([3, 1, 2]) + np.array([0, 0, 2])
    np.testing.assert_allclose(score(model, unit(), importance="taylor", gradients=gradients)[0], expected)


def test_taylor_predicts_what_the_loss_loses_without_a_channel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 1, bias=False))
    images = torch.randn(7, 5)
    model(images).mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    hidden = Unit("0", "linear", 4, (Slice("0.weight", 0, np.arange(4)[:, None]),))
    (actual,) = score(model, hidden, importance="taylor", gradients=gradients)
    with torch.no_grad():
        whole = model(images).mean().item()
        for channel in range(4):
            kept = model[0].weight[channel].clone()
            model[0].weight[channel] = 0  # this loss is linear in one layer, so first order is exact
            assert actual[channel] == pytest.approx(abs(whole - model(images).mean().item()), abs=1e-6)
            model[0].weight[channel] = kept


def test_bn_scale_is_the_norm_s_scale_or_group_norm_without_one():
    bare = Unit("0", "conv", 3, (Slice("0.weight", 0, rows([0], [1], [2])),))
    model = net()
    scaled, unscaled = score(model, unit(), bare, importance="bn_scale")
    np.testing.assert_allclose(scaled, [3, 1, 2])
    np.testing.assert_allclose(unscaled, [1 / 4, 2 / 4, 9 / 4])


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(2), nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.RMSNorm(2)])
def test_bn_scale_averages_every_kind_of_norm(norm):
    model = nn.Sequential(norm, nn.BatchNorm2d(2))
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([-2.0, 4.0]))
        model[1].weight.copy_(torch.tensor([0.0, 2.0]))
    one_each = rows([0], [1])
    pair = Unit("0", "conv", 2, (Slice("0.weight", 0, one_each), Slice("1.weight", 0, one_each)))
    np.testing.assert_allclose(score(model, pair, importance="bn_scale")[0], [1, 3])


def test_bn_scale_of_a_norm_without_scales_is_group_norm():
    model = nn.Sequential(nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2, affine=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 1.0]])[:, :, None, None])
    conv = Unit("0", "conv", 2, tuple(Slice(n, 0, rows([0], [1])) for n in ("0.weight", "1.running_var")))
    np.testing.assert_allclose(score(model, conv, importance="bn_scale")[0], [2 / 3, 4 / 3])


def test_lamp_divides_by_what_is_at_least_as_large():
    model = nn.Sequential(nn.Linear(1, 4, bias=False))
    one_each = np.arange(4)[:, None]
    linear = Unit("0", "linear", 4, (Slice("0.weight", 0, one_each),))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[2.0], [1.0], [3.0], [2.0]]))  # squares 4, 1, 9, 4
    np.testing.assert_allclose(score(model, linear, importance="lamp")[0], [4 / 17, 1 / 18, 1, 4 / 17])
    with torch.no_grad():
        model[0].weight.zero_()
    np.testing.assert_array_equal(score(model, linear, importance="lamp")[0], np.zeros(4))


def test_random_depends_on_seed_and_name_alone():
    model = net()
    first, second = score(model, unit(name="a"), unit(name="b"), importance="random", seed=3)
    swapped = score(model, unit(name="b"), unit(name="a"), importance="random", seed=3)
    np.testing.assert_array_equal(first, swapped[1])
    np.testing.assert_array_equal(second, swapped[0])
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, score(model, unit(name="a"), importance="random", seed=4)[0])
    assert ((first >= 0) & (first < 1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_networks_are_scored_in_full(dtype):
    model = net().to(dtype)
    with torch.no_grad():
        model[0].weight.mul_(300)  # squares over float16's 65,504
    gradients = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    full = net()
    with torch.no_grad():
        full[0].weight.mul_(300)
    for importance in IMPORTANCES:
        (actual,) = score(model, unit(), importance=importance, gradients=gradients)
        (expected,) = score(full, unit(), importance=importance, gradients=gradients)
        np.testing.assert_allclose(actual, expected, rtol=1e-2)


def test_a_tied_weight_is_found_under_both_names():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    units = [Unit(n, "linear", 3, (Slice(f"{n}.weight", 0, np.arange(3)[:, None]),)) for n in ("0", "1")]
    first, second = score(model, *units, importance="group_norm")
    np.testing.assert_array_equal(first, second)
    assert first.mean() == pytest.approx(1)
