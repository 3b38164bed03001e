"""Commands of dsimg as a program runs them: shown as a person would type them, and asked to stop with their parent."""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from dsimg import cli
from dsimg.errors import StopRequested
from dsimg.machine import free_port
from dsimg.stop import STOPPED

GO_ON = "stopped; the same command goes on from there"
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True)
class Command:
    """`dsimg STAGE FLAGS`, or the same on several ranks. A stage with a dot is a module that has no name of its own."""

    stage: str
    flags: tuple[str, ...]
    ranks: int = 1

    @property
    def named(self) -> str:
        """The command without its flags, as a message names it."""
        return f"`python -m {self.stage}`" if "." in self.stage else f"`dsimg {self.stage}`"

    @property
    def module(self) -> str:
        """The module that is the stage."""
        return self.stage if "." in self.stage else f"dsimg.{self.stage}"

    def __str__(self) -> str:
        if self.ranks > 1:
            words = ["deepspeed", "--quiet", "--num_gpus", str(self.ranks), "--module", self.module]
        elif "." in self.stage:
            words = ["python", "-m", self.stage]
        else:
            words = ["dsimg", self.stage]
        return shlex.join([*words, *self.flags])

    def words(self) -> list[str]:
        """Return what is run: the same with this very Python, and several ranks on a port that is free."""
        if self.ranks > 1:
            launcher = ["-m", "deepspeed.launcher.runner", "--master_port", str(free_port()), "--quiet"]
            return [sys.executable, *launcher, "--num_gpus", str(self.ranks), "--module", self.module, *self.flags]
        module = [self.stage] if "." in self.stage else ["dsimg", self.stage]
        return [sys.executable, "-m", *module, *self.flags]


Runner = Callable[[Command], int]


def run_command(command: Command) -> int:
    """Run a command, its output to the user, and return its exit code.

    A signal that asks this process to stop is passed on, once it is the command's turn to save; when that has ended,
    StopRequested is raised, and so it is where a command was stopped on its own.
    """
    chatter = cli.context().chatter
    process: subprocess.Popen[bytes] | None = None
    asked: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    with _handled_by(pass_on):
        if not asked:
            # A group of its own: Ctrl-C in a terminal would reach it twice, and a second request saves nothing.
            process = subprocess.Popen(
                command.words(),
                stdin=subprocess.DEVNULL,
                stdout=None if chatter is None else chatter.stream.fileno(),
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_end_with_parent,
            )
            if asked:
                os.killpg(process.pid, asked[-1])
            process.wait()
    if asked or (process is not None and process.returncode == STOPPED):
        raise StopRequested(GO_ON)
    assert process is not None
    return process.returncode


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let a handler have the signals that ask to stop, but for those that are ignored; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {signum: signal.getsignal(signum) for signum in SIGNALS if signal.getsignal(signum) != signal.SIG_IGN}
    for signum in former:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, before in former.items():
            signal.signal(signum, before)


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent is killed: else it would go on, and hold its run
    against the same command given again. Between fork and exec: nothing here takes a lock."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
