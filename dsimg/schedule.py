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
    """Warm-up, then cosine to zero or steps; or one cycle. Stepped once an optimizer step.

    `peak` is the highest learning rate, `steps` counts the optimizer steps of the whole run, `warmup_steps` those of
    the linear rise from zero, and `milestones` the steps at which the "step" schedule divides by ten. The one cycle is
    that of torch's OneCycleLR at its defaults, without the cycled momentum: up from peak / 25 in 30 % of the steps,
    down to peak / 250,000 in the rest, both along a cosine.
    """

    name: str
    peak: float
    steps: int
    warmup_steps: int
    milestones: tuple[int, ...] = ()

    def at(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0."""
        if self.name == "one_cycle":
            start, end = self.peak / 25, self.peak / 250_000
            top = 0.3 * self.steps - 1
            if step <= top:
                return _cosine(start, self.peak, step / top)
            return _cosine(self.peak, end, (step - top) / (self.steps - 1 - top))
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.name == "step":
            return self.peak * 0.1 ** sum(step >= milestone for milestone in self.milestones)
        return _cosine(self.peak, 0.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))


def _cosine(start: float, end: float, done: float) -> float:
    """Return the value between `start` and `end` at the share `done` of the way, along half a cosine."""
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
