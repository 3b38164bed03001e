"""Which instructions this processor is taken to have: what it says of itself, or what the user says instead."""

import os

from dsimg.errors import ConfigError

OVERRIDE = "DSIMG_INSTRUCTION_SET"
# avx2: neither exact sums of 8-bit products nor bf16; vnni: the sums; amx: both.
INSTRUCTION_SETS = ("avx2", "vnni", "amx")


def given_instruction_set() -> str | None:
    """Return the value of `DSIMG_INSTRUCTION_SET`, which makes this machine behave as another. Raises ConfigError."""
    given = os.environ.get(OVERRIDE)
    if given is not None and given not in INSTRUCTION_SETS:
        raise ConfigError(f"{OVERRIDE} is '{given}'; it is one of {', '.join(INSTRUCTION_SETS)}, or not set.")
    return given
