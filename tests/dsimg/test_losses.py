import math

import pytest
import torch
from torch.nn import functional as F

from dsimg.losses import cross_entropy, mixed_cross_entropy, soft_cross_entropy

LOGITS = torch.tensor([[0.0, 0.0], [math.log(3), 0.0], [0.0, math.log(3)]])
LABELS = torch.tensor([0, 0, 0])


def smoothed(labels, smoothing, classes):
    return F.one_hot(labels, classes) * (1 - smoothing) + smoothing / classes


def test_cross_entropy_is_minus_log_of_the_label_s_share():
    expected = torch.tensor([math.log(2), math.log(4 / 3), math.log(4)])
    torch.testing.assert_close(cross_entropy(LOGITS, LABELS, label_smoothing=0.0), expected)


def test_label_smoothing_moves_weight_to_every_class():
    losses = cross_entropy(LOGITS, LABELS, label_smoothing=0.2)
    expected = torch.tensor(
        [math.log(2), 0.9 * math.log(4 / 3) + 0.1 * math.log(4), 0.9 * math.log(4) + 0.1 * math.log(4 / 3)]
    )
    torch.testing.assert_close(losses, expected)


def test_soft_cross_entropy_of_one_hot_targets_is_cross_entropy():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5), torch.randint(5, (6,))
    for smoothing in (0.0, 0.1):
        torch.testing.assert_close(
            soft_cross_entropy(logits, smoothed(labels, smoothing, 5)),
            cross_entropy(logits, labels, label_smoothing=smoothing),
        )


def test_mixed_cross_entropy_is_soft_cross_entropy_on_mixed_targets():
    torch.manual_seed(0)
    logits, labels, partners = torch.randn(4, 5), torch.randint(5, (4,)), torch.randint(5, (4,))
    lam = torch.tensor([0.0, 0.25, 0.7, 1.0])
    for smoothing in (0.0, 0.1):
        targets = lam[:, None] * smoothed(labels, smoothing, 5)
        targets += (1 - lam[:, None]) * smoothed(partners, smoothing, 5)
        torch.testing.assert_close(
            mixed_cross_entropy(logits, labels, partners, lam, label_smoothing=smoothing),
            soft_cross_entropy(logits, targets),
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_are_computed_in_float32(dtype):
    # 2,000 equal logits: log(2000) = 7.6009, which bfloat16 would round to 7.59375.
    logits, labels = torch.zeros(1, 2000, dtype=dtype), torch.tensor([3])
    lam = torch.ones(1, dtype=dtype)
    for losses in (
        cross_entropy(logits, labels, label_smoothing=0.1),
        soft_cross_entropy(logits, torch.full((1, 2000), 1 / 2000)),
        mixed_cross_entropy(logits, labels, labels, lam, label_smoothing=0.0),
    ):
        assert losses.dtype == torch.float32
        assert losses.item() == pytest.approx(math.log(2000), abs=1e-5)


def test_gradient_is_softmax_minus_target():
    logits = torch.randn(3, 4, requires_grad=True)
    labels = torch.tensor([1, 0, 3])
    cross_entropy(logits, labels, label_smoothing=0.1).sum().backward()
    expected = logits.detach().softmax(1) - smoothed(labels, 0.1, 4)
    torch.testing.assert_close(logits.grad, expected)
