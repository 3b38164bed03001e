"""Whether decoded images fit into RAM: known from their headers, before any is decoded."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from dsimg.augment import Augmentation
from dsimg.errors import ConfigError, DataError, near
from dsimg.folder import Split
from dsimg.preprocess import MAX_PIXELS

CACHE_MODES = ("auto", "ram", "none")
_CACHE_SHARE = 0.25  # of the memory that is free
_SAMPLED_HEADERS = 256


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """Whether decoded images are kept in RAM, and a line saying so."""

    ram: bool
    text: str


def sample_sizes(split: Split) -> list[tuple[int, int]]:
    """Return (height, width) of up to 256 images, evenly spread, from their headers; no damaged ones."""
    count = len(split.files)
    sizes = []
    for index in np.unique(np.linspace(0, count - 1, min(count, _SAMPLED_HEADERS)).astype(int)):
        try:
            with Image.open(split.folder / split.files[index]) as image:
                sizes.append((image.height, image.width))
        except Exception:  # Pillow raises nearly any type on damaged bytes, which training will name
            continue
    return [(height, width) for height, width in sizes if height * width <= MAX_PIXELS]


def free_memory() -> int:
    """Return the bytes of RAM that can still be taken here: the machine's, or what its container leaves."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (found := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        free = int(found[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0))
        except (OSError, ValueError):  # no such control group, or "max": no limit
            continue
    return free


def plan_cache(
    count: int,
    sizes: Sequence[tuple[int, int]],
    mode: str,
    *,
    augmentation: Augmentation,
    local_ranks: int = 1,
) -> CachePlan:
    """Return whether `count` training images, `sizes` (h, w) a sample of theirs, are kept in RAM.

    Every rank keeps all of them, for each epoch deals them out anew. `auto` keeps images that are on average
    at most twice the model's input in pixels, in at most a quarter of the free memory for all ranks of the
    machine. Raises ConfigError for an unknown mode, DataError when `ram` is asked for and does not fit.
    """
    if mode not in CACHE_MODES:
        raise ConfigError(f"cache is '{mode}'{near(mode, CACHE_MODES)} Choose from {', '.join(CACHE_MODES)}.")
    target = augmentation.size[0] * augmentation.size[1]
    pixels = sum(height * width for height, width in sizes) / len(sizes) if sizes else float(target)
    size = round(count * 3 * (target if augmentation.fixed_size else pixels))
    free = free_memory()
    need = f"{count:,} decoded images take {gigabytes(size)}" + (
        f" in each of {local_ranks} ranks, {gigabytes(size * local_ranks)} together" if local_ranks > 1 else ""
    )
    if mode == "ram" and size * local_ranks > free:
        raise DataError(
            f"--cache ram: {need}; {gigabytes(free)} are free. Use --cache none, a smaller image_size, or fewer ranks."
        )
    small, fits = pixels <= 2 * target, size * local_ranks <= _CACHE_SHARE * free
    if mode == "ram" or (mode == "auto" and small and fits):
        return CachePlan(ram=True, text=f"in RAM: {need} of {gigabytes(free)} free")
    if mode == "none":
        return CachePlan(ram=False, text="none, decoded by the workers every epoch")
    why = (
        f"{need}, over a quarter of the {gigabytes(free)} free"
        if small
        else "the images are much larger than the model's input"
    )
    return CachePlan(ram=False, text=f"none, decoded by the workers every epoch: {why}")


def gigabytes(size: float) -> str:
    """Return bytes as "1.5 GB", or as "0.2 MB" below one."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
