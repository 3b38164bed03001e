import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dsimg.losses import cross_entropy, dist, dkd, hint, kd, mixed_cross_entropy, soft_cross_entropy

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


def pair(n, classes, *, seed=0, scale=2.0):
    """Return logits of a student and a teacher, (n, classes), and labels."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = scale * torch.randn(2, n, classes, generator=generator)
    return student, teacher, torch.randint(classes, (n,), generator=generator)


def shares(logits, temperature):
    """Return softmax(logits / T) in numpy's float64."""
    powers = np.exp(logits.double().numpy() / temperature)
    return powers / powers.sum(1, keepdims=True)


def divergence(p, q):
    return float(np.sum(p * np.log(p / q)))


def distillations(student, teacher, labels, *, temperature=2.0):
    ones = torch.ones(len(student))
    return {
        "kd": kd(student, teacher, temperature=temperature),
        "dkd": dkd(student, teacher, labels, temperature=temperature, beta=8.0),
        "dist": dist(student, teacher, temperature=temperature, weights=ones),
    }


def expected_dist(student, teacher, temperature):
    p, q = shares(student, temperature), shares(teacher, temperature)
    inter = [1 - np.corrcoef(p[i], q[i])[0, 1] for i in range(len(p))]
    intra = np.mean([1 - np.corrcoef(p[:, c], q[:, c])[0, 1] for c in range(p.shape[1])])
    return torch.from_numpy(temperature**2 * (np.array(inter) + intra)).float()


def test_kd_of_a_case_by_hand():
    # Teacher (3/4, 1/4), student (1/2, 1/2): KL = 3/4 log 3/2 + 1/4 log 1/2.
    losses = kd(torch.zeros(1, 2), torch.tensor([[2 * math.log(3), 0.0]]), temperature=2.0)
    assert losses.item() == pytest.approx(4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5)), rel=1e-5)


@pytest.mark.parametrize(("classes", "temperature"), [(2, 1.0), (7, 4.0)])
def test_kd_and_dkd_equal_numpy(classes, temperature):
    student, teacher, labels = pair(9, classes)
    p, q = shares(student, temperature), shares(teacher, temperature)
    square = temperature**2
    expected_kd, expected_dkd = [], []
    for i, label in enumerate(labels.tolist()):
        rest_p, rest_q = np.delete(p[i], label), np.delete(q[i], label)
        tckd = divergence(np.array([q[i, label], rest_q.sum()]), np.array([p[i, label], rest_p.sum()]))
        nckd = divergence(rest_q / rest_q.sum(), rest_p / rest_p.sum())
        expected_kd.append(square * divergence(q[i], p[i]))
        expected_dkd.append(square * (tckd + 3 * nckd))
        # The paper's decomposition: kd is TCKD + (1 - the teacher's share of the label) NCKD.
        assert expected_kd[i] == pytest.approx(square * (tckd + (1 - q[i, label]) * nckd))
    actual_kd = kd(student, teacher, temperature=temperature)
    actual_dkd = dkd(student, teacher, labels, temperature=temperature, beta=3.0)
    torch.testing.assert_close(actual_kd, torch.tensor(expected_kd), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(actual_dkd, torch.tensor(expected_dkd), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("classes", "temperature"), [(2, 1.0), (7, 4.0)])
def test_dist_equals_numpy(classes, temperature):
    student, teacher, _ = pair(9, classes)
    losses = dist(student, teacher, temperature=temperature, weights=torch.ones(9))
    torch.testing.assert_close(losses, expected_dist(student, teacher, temperature), atol=1e-4, rtol=1e-4)


def test_dist_leaves_padding_out_of_the_batch():
    student, teacher, _ = pair(8, 5)
    weights = torch.tensor([1, 0, 0.5, 1, 0, 1, 1, 0])
    losses = dist(student, teacher, temperature=1.0, weights=weights)
    present = weights > 0
    expected = expected_dist(student[present], teacher[present], 1.0)
    torch.testing.assert_close(losses[present], expected, atol=1e-4, rtol=1e-4)


def test_dist_of_one_row_has_no_intra_term():
    student, teacher, _ = pair(3, 5)
    expected = 1 - np.corrcoef(shares(student[:1], 1.0)[0], shares(teacher[:1], 1.0)[0])[0, 1]
    alone = dist(student[:1], teacher[:1], temperature=1.0, weights=torch.ones(1))
    padded = dist(student, teacher, temperature=1.0, weights=torch.tensor([1.0, 0.0, 0.0]))
    assert alone.item() == pytest.approx(expected, abs=1e-4)
    assert padded[0].item() == pytest.approx(expected, abs=1e-4)


def test_dist_is_blind_to_a_scale_of_the_shares_and_ends_at_two_a_term():
    rising, falling = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    ones = torch.ones(2)
    torch.testing.assert_close(dist(rising, 3 * rising, temperature=1.0, weights=ones), torch.zeros(2))
    torch.testing.assert_close(dist(rising, falling, temperature=2.0, weights=ones), torch.full((2,), 16.0))


@pytest.mark.parametrize("classes", [2, 10])
def test_a_student_that_equals_its_teacher_loses_nothing(classes):
    student, _, labels = pair(6, classes)
    for losses in distillations(student, student, labels).values():
        torch.testing.assert_close(losses, torch.zeros(6), atol=1e-3, rtol=0)  # dist: 1e-8 in its denominator


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_extreme_and_constant_logits_give_finite_losses_and_bounded_gradients(scale):
    signs, teacher, labels = pair(6, 10)
    for other in (teacher, -scale * signs.sign(), torch.zeros(6, 10)):
        for name in ("kd", "dkd", "dist"):
            logits = (scale * signs.sign()).requires_grad_()
            losses = distillations(logits, other, labels)[name]
            losses.sum().backward()
            assert torch.isfinite(losses).all(), name
            assert logits.grad.abs().max() < 500, name  # dist without a floor: 1e6 and more at scale 0


def test_a_class_that_is_constant_in_the_teacher_counts_one_and_pulls_nowhere():
    student, teacher, _ = pair(6, 4)
    teacher[:, 2] = -1e4  # no share of any row
    student.requires_grad_()
    losses = dist(student, teacher, temperature=1.0, weights=torch.ones(6))
    p, q = shares(student.detach(), 1.0), shares(teacher, 1.0)
    intra = np.mean([1 - np.corrcoef(p[:, c], q[:, c])[0, 1] for c in (0, 1, 3)])
    inter = 1 - np.corrcoef(p[0], q[0])[0, 1]
    assert losses[0].item() == pytest.approx(inter + (3 * intra + 1) / 4, abs=1e-4)
    losses.sum().backward()
    assert torch.isfinite(student.grad).all()


def test_hint_is_the_mean_squared_difference_of_a_sample():
    features = torch.zeros(2, 3, 2, 2)
    teacher = torch.stack([torch.full((3, 2, 2), 2.0), torch.cat([torch.ones(1, 2, 2), torch.zeros(2, 2, 2)])])
    torch.testing.assert_close(hint(features, teacher), torch.tensor([4.0, 1 / 3]))
    torch.testing.assert_close(hint(features.half(), teacher.bfloat16()), torch.tensor([4.0, 1 / 3]))
    torch.testing.assert_close(hint(features[:, :, 0, 0], teacher[:, :, 0, 0]), torch.tensor([4.0, 1 / 3]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distillation_is_computed_in_float32(dtype):
    student, teacher, labels = pair(5, 6)
    student, teacher = student.to(dtype), teacher.to(dtype)
    exact = distillations(student.float(), teacher.float(), labels)
    for name, losses in distillations(student, teacher, labels).items():
        assert losses.dtype == torch.float32
        assert torch.equal(losses, exact[name]), name
