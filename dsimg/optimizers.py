"""The optimizers that dsimg builds itself, so that nothing has to be compiled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """An optimizer that dsimg builds itself, from torch (or timm for LAMB)."""

    name: str  # sgd, adamw, adam, lamb
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    nesterov: bool = True


def build_optimizer(spec: OptimizerSpec, groups: Sequence[Mapping[str, Any]], *, lr: float) -> torch.optim.Optimizer:
    """Build the optimizer over parameter groups that carry their own weight decay."""
    parameters: Any = [dict(group) for group in groups]
    if spec.name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=spec.momentum, nesterov=spec.nesterov and spec.momentum > 0)
    if spec.name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=spec.betas, eps=spec.eps)
    if spec.name == "adam":
        return torch.optim.Adam(parameters, lr=lr, betas=spec.betas, eps=spec.eps)
    assert spec.name == "lamb"
    from timm.optim.lamb import Lamb

    optimizer: torch.optim.Optimizer = Lamb(parameters, lr=lr, betas=spec.betas, eps=spec.eps, max_grad_norm=None)
    return optimizer
