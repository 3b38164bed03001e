"""Losses as pure functions: one value per sample, so that the caller weighs, masks and averages.

Logits are taken to float32 first, because autocast hands them over in bfloat16 or float16.
"""

import torch
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


def kd(logits: Tensor, teacher_logits: Tensor, *, temperature: float) -> Tensor:
    """logits and teacher_logits: (N, C) -> (N,) float32: T^2 KL(softmax(teacher / T) || softmax(student / T)).

    T^2 keeps the gradient's size as T grows (Hinton et al., arXiv 1503.02531, section 2). No gradient is stopped
    here or below: the caller computes the teacher without one.
    """
    return temperature**2 * _divergence(logits.float() / temperature, teacher_logits.float() / temperature)


def dkd(logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, temperature: float, beta: float) -> Tensor:
    """logits and teacher_logits: (N, C), C >= 2, labels: (N,) int64 -> (N,) float32: T^2 (TCKD + beta NCKD).

    TCKD is the divergence of (label, all the rest), NCKD that of the other classes among themselves; `kd` is the
    same with beta = the teacher's share of the rest, which is small just where the teacher is sure (Zhao et al.,
    arXiv 2203.08679, equation 7, alpha = 1; the authors choose beta for each pair, between 0.5 and 8, and let
    the term grow over the first epochs, which is not done here).
    """
    of_label, others = _decoupled(logits.float() / temperature, labels)
    teacher_of_label, teacher_others = _decoupled(teacher_logits.float() / temperature, labels)
    return temperature**2 * (_divergence(of_label, teacher_of_label) + beta * _divergence(others, teacher_others))


def dist(logits: Tensor, teacher_logits: Tensor, *, temperature: float, weights: Tensor) -> Tensor:
    """logits and teacher_logits: (N, C), weights: (N,), 0 for a row of padding -> (N,) float32: T^2 (inter + intra).

    With p = softmax(logits / T) of either network, inter is 1 - Pearson(student, teacher) over a row, intra is
    1 - Pearson over a class's column of the batch, averaged over the classes (Huang et al., arXiv 2205.10536,
    section 4, beta = gamma = 1). intra belongs to the batch: each row gets the same value, rows that pad
    take no part, and with fewer than two rows it is 0. A row or a column that does not vary correlates with
    nothing: it counts 1, and has no gradient if it is the teacher's. With two classes inter says only whether both
    rank them alike (0 or 2); all the learning is in intra.
    """
    student = F.softmax(logits.float() / temperature, dim=1)
    teacher = F.softmax(teacher_logits.float() / temperature, dim=1)
    inter = 1 - _pearson(student, teacher, present=torch.ones_like(student))
    present = (weights > 0).float().expand(student.shape[1], -1)
    intra = (1 - _pearson(student.T, teacher.T, present=present)).mean()
    return temperature**2 * (inter + torch.where((weights > 0).sum() > 1, intra, 0.0))


def hint(features: Tensor, teacher_features: Tensor) -> Tensor:
    """features and teacher_features: (N, ...), equal shapes -> (N,) float32: the mean squared difference of a sample.

    FitNets (Romero et al., arXiv 1412.6550), but for the mean, which makes it independent of the size.
    """
    assert features.shape == teacher_features.shape, (features.shape, teacher_features.shape)
    return (features.float() - teacher_features.float()).square().flatten(1).mean(dim=1)


def _divergence(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Both (N, K) -> (N,): KL(softmax(teacher) || softmax(student))."""
    log_teacher = F.log_softmax(teacher_logits, dim=1)
    return F.kl_div(F.log_softmax(logits, dim=1), log_teacher, reduction="none", log_target=True).sum(dim=1)


def _decoupled(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits: (N, C) -> (N, 2) logits of (label, all the rest) and (N, C - 1) logits of the rest."""
    own = labels[:, None]
    rest = torch.arange(logits.shape[1] - 1, device=logits.device).expand(len(logits), -1)
    others = logits.gather(1, rest + (rest >= own))  # every class but the label's
    return torch.cat([logits.gather(1, own), others.logsumexp(dim=1, keepdim=True)], dim=1), others


def _pearson(student: Tensor, teacher: Tensor, *, present: Tensor) -> Tensor:
    """All (R, K), present 0 or 1 -> (R,): the correlation over the present entries of each row."""
    count = present.sum(dim=1, keepdim=True).clamp_min(1)

    def centred(values: Tensor) -> tuple[Tensor, Tensor]:
        values = values * present
        deviation = (values - values.sum(dim=1, keepdim=True) / count) * present
        # Correlation has no slope where nothing varies, and about 1 / variation near it: a head that starts at zero,
        # as torchvision's ViT has, would get a gradient of 1e7. Less than 1 % of variation counts as 1 %.
        return deviation, torch.maximum(deviation.norm(dim=1), 0.01 * values.norm(dim=1))

    student_deviation, student_norm = centred(student)
    teacher_deviation, teacher_norm = centred(teacher)
    # 1e-8 as in the authors' code: it also keeps classes of next to no probability from counting.
    return (student_deviation * teacher_deviation).sum(dim=1) / (student_norm * teacher_norm + 1e-8)
