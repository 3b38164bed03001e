"""What this machine lends: cores, and the instructions its processor is taken to have, which the user may say
instead."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from dsimg.errors import ConfigError

OVERRIDE = "DSIMG_INSTRUCTION_SET"
# avx2: neither exact sums of 8-bit products nor bf16; vnni: the sums; bf16: both.
INSTRUCTION_SETS = ("avx2", "vnni", "bf16")
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def all_cores() -> int:
    """Return how many cores this process may use: those it may run on, and no more than its control groups grant.

    A container with two cores' worth of time (docker --cpus 2, a Kubernetes limit) still sees all of the machine's; as
    many threads would use up the time early in each period, and wait for the rest of it.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, _granted())]))


def _granted() -> Iterator[float]:
    """Yield the cores that each control group around this process grants, version 1 or 2; none where there is no limit.

    In a container the path may be the host's, which is not there: its limit is then at the root.
    """
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = GROUPS / "cpu" if controllers else GROUPS
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        for part in ("", *(part for part in path.split("/") if part not in ("", ".."))):
            folder = folder / part
            try:
                quota, period = " ".join((folder / name).read_text().strip() for name in names).split()
                if float(quota) > 0:  # version 1 says -1 where there is no limit
                    yield float(quota) / float(period)
            except (OSError, ValueError):  # not there, or "max"
                continue


def given_instruction_set() -> str | None:
    """Return the value of `DSIMG_INSTRUCTION_SET`, which makes this machine behave as another. Raises ConfigError."""
    given = os.environ.get(OVERRIDE)
    if given is not None and given not in INSTRUCTION_SETS:
        raise ConfigError(f"{OVERRIDE} is '{given}'; it is one of {', '.join(INSTRUCTION_SETS)}, or not set.")
    return given
