"""The error tree. Each message says what was found, where, and what to do next.

DsimgError              the user can mend it: one message, exit code 2, no traceback
├── ConfigError         a flag, a recipe or a DeepSpeed JSON
├── DataError           the folder of images
│   └── ImageError      one file that is not a usable image
├── ModelError          the network or its weights
├── RunError            a run folder
├── DivergenceError     training that no longer learns
└── DeviceError         the GPUs, their memory, the ranks

StopRequested           no error: a run that ends early because it was asked to, exit code 75
"""

import difflib
from collections.abc import Iterable


class DsimgError(Exception):
    """Base of every error a user can mend. The message carries the remedy."""


class ConfigError(DsimgError):
    """A flag, a recipe or a DeepSpeed JSON is wrong."""


class DataError(DsimgError):
    """The folder of images is missing, empty or inconsistent."""


class ImageError(DataError):
    """One file cannot be decoded; the message is the reason, without the file's name."""


class ModelError(DsimgError):
    """The network cannot be built, or the weights do not fit it."""


class RunError(DsimgError):
    """A run folder is missing something, is damaged, or belongs to another config."""


class DivergenceError(DsimgError):
    """Training has lost its way: loss or gradients are not finite, step after step."""


class DeviceError(DsimgError):
    """A device is missing, too small, or shared by more ranks than it can serve."""


class StopRequested(Exception):  # noqa: N818 - it is not an error
    """A run was asked to stop and has saved; the same command goes on from there."""


def near(name: str, choices: Iterable[str]) -> str:
    """Return what ends a sentence on a wrong `name`: `", did you mean 'X'?"` for the nearest of `choices`, or `"."`."""
    matches = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f", did you mean '{matches[0]}'?" if matches else "."
