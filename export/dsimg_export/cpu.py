"""Which instructions this processor has for products of 8-bit integers: on x86 without VNNI, U8S8 sums saturate."""

import os
import platform
from pathlib import Path

from dsimg.errors import ConfigError

CPUINFO = Path("/proc/cpuinfo")
OVERRIDE = "DSIMG_INSTRUCTION_SET"
EXACT, SATURATING = "vnni", "avx2"
VNNI_FLAGS = frozenset(("avx512_vnni", "avx_vnni", "amx_int8"))


def int8_is_exact() -> bool:
    """Tell whether products of unsigned activations and signed weights are summed exactly here.

    Without VNNI they are summed in pairs in 16 bits, which saturate (onnxruntime #6004): a file whose weights keep to
    7 bits is the right one there. `DSIMG_INSTRUCTION_SET=avx2` or `vnni` overrides what the processor says. Where it
    cannot be read, the answer is no: 7 bits are right anywhere. Raises ConfigError for another value.
    """
    given = os.environ.get(OVERRIDE)
    if given is not None:
        if given not in (EXACT, SATURATING):
            raise ConfigError(f"{OVERRIDE} is '{given}'; it is '{EXACT}' or '{SATURATING}', or not set.")
        return given == EXACT
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    try:
        text = CPUINFO.read_text()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return not VNNI_FLAGS.isdisjoint(flags)
