"""What the terminal shows: the only file that imports rich.

Rank 0 speaks. Where there is no terminal, plain lines are printed. Everything that other libraries print goes to
a log file per rank instead (see `Chatter`).
"""

import contextlib
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

PLAIN_SECONDS = 10.0  # without a terminal, a progress line at most this often
BUSY = 1.1  # wall time over processor time of one thread: beyond this, other work took the core


class Terminal:
    """The user's terminal, as seen by one rank: every method is silent on ranks other than 0."""

    def __init__(self, *, rank: int = 0, stream: IO[str] | None = None) -> None:
        self.rank = rank
        self._stream = cast("IO[str]", _Steady(stream or sys.stdout))
        self._console = Console(file=self._stream, highlight=False, soft_wrap=not self._stream.isatty())
        self._live: Live | None = None
        self._last_plain = 0.0

    def as_rank_zero(self) -> "Terminal":
        """Return a terminal that speaks whatever the rank: for a rank that fails alone."""
        return Terminal(stream=self._stream)

    def say(self, text: str) -> None:
        """Print one line."""
        if self.rank == 0:
            self._console.print(Text(text))

    def data(self, line: str) -> None:
        """Print one line for another program: as it is, at any width."""
        if self.rank == 0:
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def warn(self, text: str) -> None:
        """Print one line that the user should not miss."""
        if self.rank == 0:
            self._console.print(Text.assemble(("! ", "bold yellow"), text))

    def table(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Print a two-column table: what, and its value."""
        if self.rank != 0:
            return
        if not self._console.is_terminal:
            self.say(title)
            for key, value in rows:
                self.say(f"  {key:<16} {value}")
            return
        table = Table(
            title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 1)
        )
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for key, value in rows:
            table.add_row(Text(key), Text(value))
        self._console.print(table)

    def grid(self, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table with a header."""
        if self.rank != 0:
            return
        table = Table(*header, box=None, padding=(0, 1), header_style="bold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self._console.print(table)

    def progress(self, text: str, *, last: bool = False) -> None:
        """Show `text` as the live line; `last` prints it and lets it stand."""
        if self.rank != 0:
            return
        if self._console.is_terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            if last:
                self.stop_live()
                self.say(text)
        elif last or time.monotonic() - self._last_plain >= PLAIN_SECONDS:
            self._last_plain = time.monotonic()
            self.say(text)

    def stop_live(self) -> None:
        """Take the live line away, so that what follows starts on a clean line."""
        if self._live is not None:
            self._live.stop()
            self._live = None


class _Steady(io.TextIOBase):
    """A stream to a reader that may go away (a pipe to `head`, a full disk): what it does not take is dropped.

    A training of days must not end because nobody watches it any more.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream beneath."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write what the reader takes."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what the reader takes."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether a person may be watching."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Of the stream beneath."""
        return self._stream.fileno()


class Chatter:
    """Sends what other libraries write to standard output and error, even from C, into a file.

    `stream` is the real standard output. The file starts under a temporary name, and `move_to` gives it its place
    in the run folder once there is one.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = (os.dup(1), os.dup(2))
        self.stream: IO[str] = io.TextIOWrapper(
            os.fdopen(os.dup(1), "wb", buffering=0),
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        handle, name = tempfile.mkstemp(prefix="dsimg-", suffix=".log")
        self.path = Path(name)
        self._temporary = True
        self._send_to(handle)

    @property
    def has_place(self) -> bool:
        """Whether the log lies in a run folder, and will stay."""
        return not self._temporary

    def _send_to(self, handle: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)

    def move_to(self, path: Path) -> None:
        """Append what was caught so far to `path`, and go on writing there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        old = self.path
        sys.stdout.flush()
        sys.stderr.flush()
        with old.open("rb") as source, path.open("ab") as target:
            shutil.copyfileobj(source, target)
        self._send_to(handle)
        self.path = path
        if self._temporary:
            old.unlink()
            self._temporary = False

    def stop(self) -> None:
        """Give standard output and error back; a log that found no run folder is dropped."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.stream.close()
        for number, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        if self._temporary:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()


def bytes_text(count: float) -> str:
    """Return a byte count as a person reads it: '1.5 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def count_text(count: float) -> str:
    """Return a count as a person reads it: '0.27 M', '1.82 G'."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit * 0.1 and count >= 1000:
            return f"{count / limit:.2f} {unit}"
    return f"{count:.0f}"


def ms_text(seconds: float) -> str:
    """Return a latency as a person reads it: '4.72 ms', '1,234 ms'."""
    return f"{ms_number(seconds)} ms"


def ms_number(seconds: float) -> str:
    """Return the milliseconds of `ms_text` for a column that says so at its head."""
    ms = 1000 * seconds
    return f"{ms:.3g}" if ms < 999.5 else f"{ms:,.0f}"  # beyond that .3g turns to exponents


def busy_text(waited: float | None) -> str | None:
    """Return what to say of milliseconds while other work took the core; None where none did, or nothing is known.

    waited: wall time over processor time of one thread.
    """
    if waited is None or waited <= BUSY:
        return None
    return f"other work had the core for {1 - 1 / waited:.0%} of the time: trust the ratios, not the milliseconds."


def duration_text(seconds: float) -> str:
    """Return a duration as a person reads it: '1:05', '2:03:04'."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
