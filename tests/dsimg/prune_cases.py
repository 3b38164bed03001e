"""What the tests of pruning share: quick flags, a network worth cutting, sessions that take no time, and kills.

`python -m tests.dsimg.prune_cases WORDS` is `dsimg prune WORDS` with such sessions.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from dsimg import cli, cutter, prune
from dsimg.cutting import Serving
from dsimg.models import count_macs
from tests.dsimg.train_cases import FAST

QUICK: dict[str, Any] = {**{name: value for name, value in FAST.items() if name != "model"}, "epochs": 1, "round_to": 1}


def middle(num_classes: int) -> nn.Module:
    """A network with channels enough for a target to be met within 3 %, and little to compute."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=4, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 96, 3, stride=2, padding=1),
        nn.BatchNorm2d(96),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, num_classes),
    )


def wide(num_classes: int) -> nn.Module:
    """A network whose time on ONNX Runtime is that of its convolutions, even on 32 x 32 images."""
    return nn.Sequential(
        nn.Conv2d(3, 96, 3, padding=1),
        nn.BatchNorm2d(96),
        nn.ReLU(),
        nn.Conv2d(96, 96, 3, padding=1),
        nn.BatchNorm2d(96),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, num_classes),
    )


class CountedSessions:
    """Sessions that take a microsecond per thousand MACs in fp32 and half of that in int8: exact, and at once."""

    cheap = False

    def __init__(self, source: nn.Module, *, serving: Serving, input_size: tuple[int, int, int], **_: Any) -> None:
        self.serving, self._side = serving, input_size[1]
        self._macs: dict[str, int] = {}
        self.add("source", source)

    def add(self, name: str, model: nn.Module) -> None:
        """Count a network's MACs."""
        self._macs[name] = count_macs(model, self._side)

    def seconds(self, names: Sequence[str], *, int8: Sequence[bool], **_: Any) -> dict[str, float]:
        """Return what `Sessions.seconds` does."""
        return {f"{name} {'int8' if q else 'fp32'}": 1e-9 * self._macs[name] / (1 + q) for name in names for q in int8}

    def share(self, model: nn.Module) -> float:
        """Return the share of the source's."""
        self.add("candidate", model)
        return self._macs["candidate"] / self._macs["source"]

    def close(self) -> None:
        """There are no files."""


def without_waiting(patch: pytest.MonkeyPatch) -> None:
    """Let the prune stage count instead of measuring."""
    patch.setattr(cutter, "Sessions", CountedSessions)


def kill_before(target: Path) -> None:
    """End this process by SIGKILL when it is about to give a file, or a folder, its name for the first time."""

    def watched(real: Any) -> Any:
        def rename(source: Any, to: Any, **rest: Any) -> Any:
            if Path(to) == target and not target.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            return real(source, to, **rest)

        return rename

    os.replace, os.rename = watched(os.replace), watched(os.rename)


def ended(words: Sequence[str], target: Path | None = None) -> int:
    """Return how `dsimg prune WORDS` ends in a process of its own, killed before it writes `target`: -9, or its exit
    code. In a fork, which has torch and DeepSpeed already."""
    child = os.fork()
    if child == 0:
        if target is not None:
            kill_before(target)
        main(words)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(words: Sequence[str]) -> None:
    """Run the stage, on as many ranks as there are."""
    cutter.Sessions = CountedSessions  # type: ignore[assignment, misc]
    if "KILL_BEFORE" in os.environ:
        kill_before(Path(os.environ["KILL_BEFORE"]))
    cli.run(prune.prune, words)


if __name__ == "__main__":
    main(sys.argv[1:])
