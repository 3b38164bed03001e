"""What this machine is and lends: cores, a free port, its processor's name and instructions, which the user may say
instead. On x86 without VNNI sums of products of 8-bit integers saturate."""

import math
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

from dsimg.errors import ConfigError

OVERRIDE = "DSIMG_INSTRUCTION_SET"
# avx2: neither exact sums of 8-bit products nor bf16; vnni: the sums; bf16: both.
INSTRUCTION_SETS = ("avx2", "vnni", "bf16")
GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
CPUINFO = Path("/proc/cpuinfo")
VNNI_FLAGS = frozenset(("avx512_vnni", "avx_vnni", "amx_int8"))


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


def int8_is_exact() -> bool:
    """Tell whether products of unsigned activations and signed weights are summed exactly here.

    Without VNNI they are summed in pairs in 16 bits, which saturate (onnxruntime #6004): a file whose weights keep to
    7 bits is the right one there. `DSIMG_INSTRUCTION_SET=avx2` or `vnni` overrides what the processor says. Where it
    cannot be read, the answer is no: 7 bits are right anywhere. Raises ConfigError as `given_instruction_set`.
    """
    given = given_instruction_set()
    if given is not None:
        return given != "avx2"
    if is_arm():
        return True
    try:
        text = CPUINFO.read_text()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return not VNNI_FLAGS.isdisjoint(flags)


def is_arm() -> bool:
    """Tell whether this is a 64-bit ARM processor."""
    return platform.machine().lower() in ("arm64", "aarch64")


def processor_name() -> str:
    """Return what this processor calls itself, or its architecture where it does not."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def free_port() -> int:
    """Return a port of this host that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
