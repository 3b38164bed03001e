"""This processor: its name, and its instructions for products of 8-bit integers (on x86 without VNNI, U8S8 sums
saturate)."""

import platform
from pathlib import Path

from dsimg.processor import given_instruction_set

CPUINFO = Path("/proc/cpuinfo")
VNNI_FLAGS = frozenset(("avx512_vnni", "avx_vnni", "amx_int8"))


def int8_is_exact() -> bool:
    """Tell whether products of unsigned activations and signed weights are summed exactly here.

    Without VNNI they are summed in pairs in 16 bits, which saturate (onnxruntime #6004): a file whose weights keep to
    7 bits is the right one there. `DSIMG_INSTRUCTION_SET=avx2` or `vnni` overrides what the processor says. Where it
    cannot be read, the answer is no: 7 bits are right anywhere. Raises ConfigError as `given_instruction_set`.
    """
    given = given_instruction_set()
    if given is not None:
        return given != "avx2"
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    try:
        text = CPUINFO.read_text()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")), [])
    return not VNNI_FLAGS.isdisjoint(flags)


def processor_name() -> str:
    """Return what this processor calls itself, or its architecture where it does not."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()
