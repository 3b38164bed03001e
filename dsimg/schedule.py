"""The learning rate as a function of the optimizer step. Pure numbers, no torch."""

import math
from dataclasses import dataclass

REFERENCE_BATCH = 256  # `--lr` is stated for this global batch (Goyal et al. 2017, arXiv 1706.02677)


def scale_lr(lr: float, *, batch_size: int, scaling: str) -> float:
    """Return the learning rate for a global batch: linear, by the square root, or as given."""
    ratio = batch_size / REFERENCE_BATCH
    return lr * {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[scaling]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up, then cosine to zero or steps; or one cycle (up for 30 %, down to zero). Stepped once an optimizer step.

    `peak` is the highest learning rate, `steps` counts the optimizer steps of the whole run, `warmup_steps` those of
    the linear rise from zero, and `milestones` the steps at which the "step" schedule divides by ten.
    """

    name: str
    peak: float
    steps: int
    warmup_steps: int
    milestones: tuple[int, ...] = ()

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0."""
        rise = round(0.3 * self.steps) if self.name == "one_cycle" else self.warmup_steps
        if step < rise:
            return self.peak * (step + 1) / rise
        if self.name == "step":
            return self.peak * 0.1 ** sum(step >= milestone for milestone in self.milestones)
        done = (step - rise) / max(1, self.steps - rise)
        if self.name == "one_cycle":
            return self.peak * (1.0 - min(1.0, done))
        return self.peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
