"""The optimizers that dsimg builds itself."""

import pytest
import torch

from dsimg.optimizers import OptimizerSpec, build_optimizer


def groups() -> list[dict[str, object]]:
    weight, bias = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    return [{"params": [weight], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]


@pytest.mark.parametrize(("name", "kind"), [("sgd", "SGD"), ("adamw", "AdamW"), ("adam", "Adam"), ("lamb", "Lamb")])
def test_each_name_is_the_optimizer_with_its_groups(name: str, kind: str) -> None:
    if name == "lamb":
        pytest.importorskip("timm")
    optimizer = build_optimizer(OptimizerSpec(name=name), groups(), lr=0.5)
    assert type(optimizer).__name__ == kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_lamb_leaves_clipping_to_the_engine() -> None:
    """timm's Lamb clips the gradient's norm to 1 unless told not to."""
    pytest.importorskip("timm")
    moved = []
    for size in (1.0, 1000.0):
        parts = groups()
        optimizer = build_optimizer(OptimizerSpec(name="lamb"), parts, lr=0.5)
        assert optimizer.defaults["max_grad_norm"] is None
        for part in parts:
            part["params"][0].grad = torch.full((3,), size)  # type: ignore[index]
        optimizer.step()
        moved.append(parts[0]["params"][0].detach().clone())  # type: ignore[index]
    torch.testing.assert_close(moved[0], moved[1])


def test_sgd_without_momentum_has_no_nesterov() -> None:
    optimizer = build_optimizer(OptimizerSpec(name="sgd", momentum=0.0), groups(), lr=0.1)
    assert optimizer.defaults["nesterov"] is False
