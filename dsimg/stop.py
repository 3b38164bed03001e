"""Asked to stop: signals, the stop file, the clock, the launcher's end.

A request is only noted here; the training loop acts on it at its next step boundary. Nothing here imports torch.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsimg.errors import ConfigError

# Their order is what the ranks exchange.
REASONS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP", "stop_file", "max_hours", "launcher")

STOPPED = 75  # EX_TEMPFAIL: the same command resumes

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_LOOK_S = 0.5  # between two looks at the stop file, the clock and the launcher
_SAME_EVENT_S = 1.0  # torchrun and the terminal both deliver one Ctrl-C

_TORCH_LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_DEEPSPEED_LAUNCHER = "deepspeed.launcher.launch"
_DEEPSPEED_RUNNERS = ("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner")

_watching = False  # whether the process's wakeup descriptor is a StopWatch's


class StopWatch:
    """Notes the first of REASONS that asked this process to stop in `reason`; None so far. One a process.

    `max_hours` count from the watch's creation. `at_once(reason, exit_code)` is called in the watch's thread and ends
    the process: with 75 at a first request while `nothing_to_save`, which the loop sets to False when training starts;
    with 128 + its number when a signal comes again, more than a second after it came first. Another signal is no
    second one: a terminal's SIGINT is followed by the launcher's SIGTERM, SLURM's SIGUSR1 by its SIGTERM.

    Create it before anything forks: a child inherits handlers that do nothing, and so outlives the signals that
    launchers send to whole trees. Created outside the main thread, or without `signals`, it takes none.
    """

    def __init__(
        self,
        *,
        stop_file: Path | None,
        max_hours: float | None,
        at_once: Callable[[str, int], None],
        signals: bool = True,
    ) -> None:
        global _watching
        self.reason: str | None = None
        self.nothing_to_save = True
        self._stop_file = stop_file
        self._deadline = None if max_hours is None else time.monotonic() + max_hours * 3600
        self._at_once = at_once
        self._launcher_is_gone = _launcher_watch()
        self._first: dict[int, float] = {}  # when each signal came first, s
        self._former: dict[signal.Signals, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(_LOOK_S)
        self._writer.setblocking(False)
        if signals and threading.current_thread() is threading.main_thread():
            # Python runs handlers in the main thread, between two instructions: not while a collective waits for a
            # rank that is gone. The descriptor is written to at once, whatever the main thread is at.
            self._former_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            _watching = True
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # by nohup
            self._former = {signum: signal.signal(signum, _do_nothing) for signum in _SIGNALS if signum not in ignored}
        self._thread = threading.Thread(target=self._watch, name="dsimg-stop", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give the signals back to their former handlers and end the thread."""
        global _watching
        if self._former:
            for signum, handler in self._former.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(self._former_wakeup)
            _watching = False
        self._writer.shutdown(socket.SHUT_WR)  # ends the reading, though a forked child may still hold the socket
        self._thread.join()
        self._writer.close()

    def _watch(self) -> None:
        with self._reader:
            while True:
                try:
                    numbers = self._reader.recv(4096)
                except TimeoutError:
                    numbers = None
                if numbers == b"":
                    return
                for number in numbers or b"":
                    self._note_signal(number)
                if self.reason is None:
                    self._look()

    def _note_signal(self, number: int) -> None:
        if number not in _SIGNALS:  # the descriptor gets those of other handlers, too: torch's of SIGCHLD
            return
        name, now = signal.Signals(number).name, time.monotonic()
        if now - self._first.setdefault(number, now) > _SAME_EVENT_S:
            self._at_once(name, 128 + number)
        self._note(name)

    def _look(self) -> None:
        # Not Path.exists, which raises where a network file system is unwell.
        if self._stop_file is not None and os.path.exists(self._stop_file):  # noqa: PTH110
            self._note("stop_file")
        elif self._deadline is not None and time.monotonic() > self._deadline:
            self._note("max_hours")
        elif self._launcher_is_gone():
            self._note("launcher")

    def _note(self, reason: str) -> None:
        if self.reason is None:
            self.reason = reason
            if self.nothing_to_save:
                self._at_once(reason, STOPPED)


def check_stop_file(path: Path) -> None:
    """Raise ConfigError when the stop file is there already: the run would stop again and be queued again for ever."""
    if path.exists():
        raise ConfigError(f"the stop file {path} is there already, so the run would stop at once. Remove it to go on.")


def reason_text(reason: str, *, stop_file: Path | None, max_hours: float | None) -> str:
    """Return a reason of REASONS for people: what it was that asked."""
    texts = {
        "stop_file": f"the stop file {stop_file}",
        "max_hours": f"--max_hours {max_hours}",
        "launcher": "the end of its launcher",
    }
    return texts.get(reason, reason)


def _do_nothing(*_: object) -> None:
    """Handle a signal: a Python handler is what makes it reach the wakeup descriptor."""


def _leave_the_parents_socket() -> None:
    """Keep a signal to a forked child from reaching the parent's watch, whose socket the child inherits."""
    if _watching:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_the_parents_socket)


def _launcher_watch() -> Callable[[], bool]:
    """Return what tells whether the launcher of this process is gone.

    Only DeepSpeed's and torch's count. A shell may end, and mean its program to go on (nohup). `deepspeed` starts
    launch.py, which starts the ranks; a signal to `deepspeed` ends nothing else (deepspeed 0.19.8).
    """
    launcher = os.getppid()
    program = _program(launcher)
    if program == _DEEPSPEED_LAUNCHER:
        runner = _parent(launcher)
        if runner is not None and _program(runner) in _DEEPSPEED_RUNNERS:
            return lambda: os.getppid() != launcher or _parent(launcher) not in (runner, None)
    elif program not in _TORCH_LAUNCHERS:
        return lambda: False
    return lambda: os.getppid() != launcher


def _program(pid: int) -> str:
    """Return the module, or the name of the script, that the Python process `pid` runs; "" where it cannot be told."""
    try:
        words = iter(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[1:])
    except OSError:
        return ""
    for word in words:
        if word in ("-W", "-X"):  # these take a value
            next(words, "")
        elif word == "-m":
            return next(words, "")
        elif not word.startswith("-"):
            return word.rpartition("/")[2]
    return ""


def _parent(pid: int) -> int | None:
    """Return the parent of the process `pid`; None where it cannot be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[1])  # the name before it may hold spaces and parentheses
