"""Losses as pure functions: one value per sample, so that the caller weighs, masks and averages.

Logits are taken to float32 first, because autocast hands them over in bfloat16 or float16.
"""

from torch import Tensor
from torch.nn import functional as F


def cross_entropy(logits: Tensor, labels: Tensor, *, label_smoothing: float) -> Tensor:
    """logits: (N, C), labels: (N,) int64, 0 <= label_smoothing < 1 -> (N,) float32.

    With smoothing s the target is (1 - s) on the label plus s / C on every class (Szegedy et al., arXiv
    1512.00567, equation 6; the label gets its share of s as well).
    """
    return F.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=label_smoothing)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits: (N, C), targets: (N, C), rows summing to 1 -> (N,) float32: -sum_c targets_c log softmax_c."""
    return -(targets.float() * F.log_softmax(logits.float(), dim=1)).sum(dim=1)


def mixed_cross_entropy(
    logits: Tensor, labels: Tensor, partner_labels: Tensor, lam: Tensor, *, label_smoothing: float
) -> Tensor:
    """Cross-entropy for images mixed as lam * image + (1 - lam) * partner, each row with its own lam.

    logits: (N, C), labels and partner_labels: (N,) int64, lam: (N,) in [0, 1] -> (N,) float32. Equal to
    `soft_cross_entropy` on the mixed smoothed targets, without making them (mixup, arXiv 1710.09412; CutMix,
    1905.04899).
    """
    lam = lam.float()
    own = cross_entropy(logits, labels, label_smoothing=label_smoothing)
    partner = cross_entropy(logits, partner_labels, label_smoothing=label_smoothing)
    return lam * own + (1 - lam) * partner
