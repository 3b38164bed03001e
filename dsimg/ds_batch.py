"""The batch algebra of a DeepSpeed JSON: batch = micro-batch x accumulation x ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsimg.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """batch_size = micro_batch_size x accumulation_steps x world_size, in images."""

    batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    world_size: int


def batch_sizes(
    config: Mapping[str, Any], *, source: str, world_size: int, batch_size: int, batch_size_given: bool
) -> BatchSizes:
    """Solve batch = micro x accumulation x world for what a checked JSON leaves open, as DeepSpeed would.

    A batch that is absent beside a fixed micro batch follows from it; one that is absent or "auto" otherwise is
    `batch_size`, in images over all ranks, which is binding when it was `batch_size_given` on the command line.
    Raises ConfigError, with what would fit, when the numbers do not.
    """
    batch, micro, steps = _solve(config, source=source, world_size=world_size, batch_size=batch_size)
    if batch_size_given and batch != batch_size:
        raise ConfigError(
            f"{source}: its batch sizes make {batch} images per step and the command line asks "
            f'for {batch_size}; keep one of them, or write "auto" in the file'
        )
    return BatchSizes(batch_size=batch, micro_batch_size=micro, accumulation_steps=steps, world_size=world_size)


def _solve(config: Mapping[str, Any], *, source: str, world_size: int, batch_size: int) -> tuple[int, int, int]:
    """Return batch, micro batch and accumulation steps."""

    def fixed(key: str) -> int | None:
        value = config.get(key, "auto")
        return None if value == "auto" else int(value)

    train = fixed("train_batch_size")
    micro = fixed("train_micro_batch_size_per_gpu")
    steps = fixed("gradient_accumulation_steps")
    if train is None and (micro is None or (steps is None and config.get("train_batch_size") == "auto")):
        train, whose = batch_size, "the stage's batch size"
    else:
        whose = "train_batch_size"
    if train is None:
        assert micro is not None
        steps = steps or 1
        return micro * steps * world_size, micro, steps
    if micro is not None and steps is not None:
        if train != micro * steps * world_size:
            ways = [f"set train_batch_size to {micro * steps * world_size}"]
            if train % (micro * world_size) == 0:
                ways.append(f"set gradient_accumulation_steps to {train // (micro * world_size)}")
            elif train % (steps * world_size) == 0:
                ways.append(f"set train_micro_batch_size_per_gpu to {train // (steps * world_size)}")
            else:
                ways.append('set two of the three to "auto"')
            if train % (micro * steps) == 0:
                ways.insert(0, f"{gpus(train // (micro * steps))} would fit, start with so many")
            raise ConfigError(
                f"{source}: train_batch_size {train} is not {micro} (train_micro_batch_size_per_gpu) x "
                f"{steps} (gradient_accumulation_steps) x {world_size} (GPUs found); "
                f"{', or '.join(ways)}"
            )
        return train, micro, steps
    known, name = (micro, "train_micro_batch_size_per_gpu") if micro else (steps or 1, "gradient_accumulation_steps")
    unit = known * world_size
    if train % unit:
        fits = " or ".join(str(size) for size in (train // unit * unit, (train // unit + 1) * unit) if size)
        raise ConfigError(
            f"{source}: {whose} {train} cannot be split into {known} ({name}) x {gpus(world_size)}; "
            f"{fits} would fit as the batch size"
        )
    return (train, known, train // unit) if micro else (train, train // unit, known)


def gpus(count: int) -> str:
    """Return "1 GPU", "2 GPUs"."""
    return f"{count} GPU{'s' if count > 1 else ''}"
