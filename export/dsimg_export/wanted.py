"""What `dsimg compress` is asked: its flags, and what follows from them alone."""

import math
from dataclasses import dataclass
from pathlib import Path

from dsimg.console import ms_text
from dsimg.errors import ConfigError
from dsimg.metrics import points_text
from dsimg.recipe import latency_goal


@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """The flags of `dsimg compress`."""

    source: Path
    """The trained run to compress: the teacher of all that is tried."""
    data: str | None = None
    """The images to train, calibrate and measure with. Default: those that the source was trained on."""
    out: Path
    """The folder for the runs, report.html, report.json, report.png, and the run `winner`."""
    max_drop: float = 0.01
    """How far below the source's the winner's accuracy may be, 0.01 being one point."""
    target_latency: str | None = None
    """What the winner may take for one run here: a time (5ms), or a share of the source's in fp32 (0.5)."""
    students: tuple[str, ...] | None = None
    """Architectures to distil the source into. Default: the three smallest of its family that are smaller than it."""
    ratios: tuple[float, ...] = (1.0, 0.5, 0.25)
    """Shares of multiply-adds to prune the source and each student to; 1, the whole network, is always tried."""
    epochs: int = 20
    """Passes over the training images, of each distillation and after each pruning."""
    lr: float | None = None
    """Peak learning rate of distillation, for a global batch of 256. Default: that of `dsimg distill`."""
    prune_lr: float | None = None
    """The same after pruning. Default: --lr."""
    recipe: Path | None = None
    """A TOML file of further training flags, which distill and prune get as their --config."""
    deepspeed_config: str | None = None
    """A DeepSpeed JSON for the trainings: a path, or a name such as zero2."""
    ranks: int = 1
    """GPUs or processes that train together, on this machine."""
    round_to: int | None = None
    """Pruned widths stay multiples of this. Default: 8 for a cifar_resnet, 16 for others."""
    latency_batch: int = 1
    """Images a run of the session."""
    latency_threads: int = 1
    """Threads of the session."""
    budget_minutes: float | None = None
    """Start no further candidate after so many minutes of this start; what is running is finished."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop < 1:
            raise ConfigError(
                f"--max_drop is {self.max_drop}; it is a share of the images, such as 0.01 for one point."
            )
        if self.target_latency is not None:
            latency_goal(self.target_latency)
        if not self.ratios or not all(0 < ratio <= 1 for ratio in self.ratios):
            raise ConfigError(f"--ratios is {self.ratios}; give shares above 0 and at most 1.")
        for name in ("epochs", "ranks", "latency_batch", "latency_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("lr", "prune_lr", "budget_minutes"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"--{name} is {value}; it must be a positive number.")
        if self.round_to is not None and self.round_to < 1:
            raise ConfigError(f"--round_to is {self.round_to}; it must be at least 1.")


def ratios_of(config: CompressConfig) -> tuple[float, ...]:
    """Return the shares of multiply-adds to try, each once, as they are named and passed on: with six digits."""
    return tuple(dict.fromkeys((1.0, *(float(f"{ratio:g}") for ratio in config.ratios))))


def target_of(config: CompressConfig, source_seconds: float) -> float | None:
    """Return the latency that is asked for in seconds, or None; source_seconds: what the source takes in fp32."""
    if config.target_latency is None:
        return None
    value, is_seconds = latency_goal(config.target_latency)
    return value if is_seconds else value * source_seconds


def wanted_text(config: CompressConfig) -> str:
    """Return in words what is looked for."""
    wanted = f"the fastest that loses at most {points_text(config.max_drop)} of Top-1"
    if config.target_latency is None:
        return wanted
    value, is_seconds = latency_goal(str(config.target_latency))
    target = ms_text(value) if is_seconds else f"{value:g} of the source's latency"
    return f"{wanted}, and takes at most {target}"
