"""Predictions of any number of files as a CSV or Parquet table, written as they come; a stopped one goes on.

The rows go into OUT.partial in the order of the files, which becomes OUT at the end. Every few seconds they are synced,
and OUT.state.json is set to how many there are and how long the file is: what a kill leaves beyond that is cut off, so
that no row is there twice. The state stays beside the table, and says from what it was made.
"""

import contextlib
import csv
import dataclasses
import errno
import fcntl
import glob
import hashlib
import importlib
import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dsimg.errors import ConfigError, RunError
from dsimg.run import read_json, replacing, sync_folder, write_json

SYNC_SECONDS = 2.0
SUFFIXES = (".csv", ".parquet")
KINDS = ("class", "probability")


def check_table(path: Path) -> None:
    """Raise ConfigError where the table cannot be written: its name's end, a folder, a package that is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--out {path} ends in '{path.suffix}'; a table ends in {' or '.join(SUFFIXES)}.")
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder. Give the name of a table in it: {path / 'predictions.csv'}.")
    if path.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(f"--out {path} needs pyarrow: pip install pyarrow, or write a .csv.")


class _Given:
    """What gives a writer of lines back what it writes."""

    def write(self, text: str) -> str:
        return text


_LINES = csv.writer(_Given(), lineterminator="\r\n")  # it quotes the line ends that it writes, no others


@dataclass(frozen=True)
class _State:
    """How far a table is: its whole rows, the bytes of OUT.partial they take, and how many of them have an error.

    table: the bytes of OUT once all rows are there, set just before OUT is.
    """

    asked: dict[str, Any]
    rows: int = 0
    bytes: int = 0
    bad: int = 0
    table: int | None = None


class PredictionTable:
    """A table, which a `with` opens to be written. Columns: file, class, probability, class_2, ..., error."""

    def __init__(
        self, path: Path, files: Sequence[Path], *, asked: dict[str, Any], top: int, overwrite: bool = False
    ) -> None:
        """Nothing is written yet. `asked` is what the rows depend on besides the files."""
        self.path, self.top, self._overwrite = path, top, overwrite
        self._partial = path.with_name(f"{path.name}.partial")
        self._state_path = path.with_name(f"{path.name}.state.json")
        digest = hashlib.sha256()
        for file in files:
            digest.update(os.fsencode(file) + b"\0")
        self._state = _State({**asked, "top": top, "files": digest.hexdigest()})

    @property
    def rows(self) -> int:
        """How many files have their row."""
        return self._state.rows

    @property
    def bad(self) -> int:
        """How many rows have an error."""
        return self._state.bad

    def is_finished(self) -> bool:
        """Tell whether the table is there, whole, and the one that is asked for."""
        return self._is_written(self._last_state()) and not self._partial.exists()

    def add(self, file: Path, classes: Sequence[tuple[str, float]], error: str | None) -> None:
        """Write a row: the best classes with their probabilities, or why there are none. Raises RunError."""
        cells: list[str] = []
        for name, share in classes:
            cells += [name, f"{share:.6g}"]
        size = self._write([str(file), *cells, *[""] * (2 * self.top - len(cells)), error or ""])
        state = self._state
        # All of it at once, for Ctrl-C may come between any two lines.
        self._state = _State(state.asked, state.rows + 1, state.bytes + size, state.bad + (error is not None))
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Make the rows last. Raises RunError."""
        try:
            self._file.flush()
            self._file.truncate(self._state.bytes)  # a row that was not finished
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._refused(error) from error
        self._keep(self._state)
        self._synced = time.monotonic()

    def finish(self) -> None:
        """Give the table its name. Raises RunError."""
        self.sync()
        self._file.close()
        try:
            if self.path.suffix.lower() == ".parquet":
                with replacing(self.path) as temporary:
                    _to_parquet(self._partial, temporary)
                    self._keep(dataclasses.replace(self._state, table=temporary.stat().st_size))
                self._partial.unlink()
            else:
                self._keep(dataclasses.replace(self._state, table=self._state.bytes))
                self._partial.replace(self.path)
                sync_folder(self.path.parent)
            for name in (self.path.name, self._state_path.name):  # of a kill in `replacing`
                for left in self.path.parent.glob(f".{glob.escape(name)}.*.tmp"):
                    left.unlink()
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> "PredictionTable":
        """Begin the table, or go on with it. Raises RunError.

        What stands in the way: another process, a table or a part of one that was made with something else, a folder
        that cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as stack:
                stack.enter_context(_locked(self.path))
                self._open()
                self._lock = stack.pop_all()
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}. Choose another --out.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if not self._file.closed:
                try:
                    if kind is not RunError:  # stopped, by Ctrl-C for one: the rows so far are good
                        self.sync()
                finally:
                    with contextlib.suppress(OSError):  # a full disk, of which has been told
                        self._file.close()

    def _open(self) -> None:
        """Open OUT.partial behind its last row. Raises RunError, OSError."""
        last, begun = self._last_state(), self._partial.exists()
        if not self._overwrite:
            self._refuse_other(last, begun=begun)
        same = last is not None and last.asked == self._state.asked
        if last is not None and same and begun and self._partial.stat().st_size >= last.bytes:
            self._state = dataclasses.replace(last, table=None)
        if not self._state.rows:  # said first, so that what was there is not taken for what comes
            self._state = _State(self._state.asked)
            self._keep(self._state)
        self._file = self._partial.open("r+b" if begun else "w+b")
        self._file.truncate(self._state.bytes)
        self._file.seek(self._state.bytes)
        self._synced = time.monotonic()
        if not self._state.bytes:
            names = [f"{kind}{'' if place == 1 else f'_{place}'}" for place in range(1, self.top + 1) for kind in KINDS]
            size = self._write(["file", *names, "error"])
            self._state = dataclasses.replace(self._state, bytes=size)

    def _refuse_other(self, last: _State | None, *, begun: bool) -> None:
        """Raise RunError where a table, or one that was begun, is not what is asked for."""
        there = self.path.exists()
        if there and begun and self._is_written(last):  # killed between the two
            return
        if not there and (not begun or (last is not None and last.asked == self._state.asked)):
            return
        differing = [] if last is None else [k for k, v in self._state.asked.items() if last.asked.get(k) != v]
        made = f"made with another {' and '.join(differing)}" if differing else "and may not be what is asked for"
        raise RunError(
            f"{self.path if there else self._partial} is there, {made}. Replace it with --overwrite, or choose another "
            "--out."
        )

    def _last_state(self) -> _State | None:
        """Return the state that was written last, by any command; None where there is none that can be read."""
        try:
            return _State(**read_json(self._state_path))
        except (RunError, TypeError):
            return None

    def _is_written(self, last: _State | None) -> bool:
        """Tell whether OUT is what is asked for, by the state that was written last."""
        if last is None or last.asked != self._state.asked or last.table is None:
            return False
        return self.path.exists() and self.path.stat().st_size == last.table

    def _keep(self, state: _State) -> None:
        write_json(self._state_path, dataclasses.asdict(state))

    def _write(self, cells: Sequence[str]) -> int:
        """Write a line, and return its bytes. Text that is none, in names of files for one, gets backslashes."""
        text: str = _LINES.writerow(cells)
        line = (text.removesuffix("\r\n") + "\n").encode("utf-8", "backslashreplace")
        try:
            self._file.write(line)
        except OSError as error:
            raise self._refused(error) from error
        return len(line)

    def _refused(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write {self.path}: {error.strerror or error}. {self.rows} rows are kept; free some space, and the "
            "same command goes on."
        )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes out, by a lock on OUT.lock, which is removed at the end. Raises RunError when one is in."""
    name = path.with_name(f"{path.name}.lock")
    while True:
        with name.open("wb") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):  # else a file system without locks
                    raise RunError(
                        f"another process is writing {path}. Wait for it, or choose another --out."
                    ) from error
            if not _is_at(name, file):  # removed by the process that had it, after it was opened here
                continue
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    name.unlink()
            return


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Tell whether an open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _to_parquet(source: Path, target: Path) -> None:
    """Write a CSV table as Parquet, a block at a time."""
    pa: Any = importlib.import_module("pyarrow")
    pa_csv: Any = importlib.import_module("pyarrow.csv")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    with source.open(encoding="utf-8", newline="") as stream:
        names = next(csv.reader(stream))
    types = {name: pa.float64() if name.startswith("probability") else pa.string() for name in names}
    # A class may be called NA or null.
    options = pa_csv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )
    parse = pa_csv.ParseOptions(newlines_in_values=True)
    with (
        pa_csv.open_csv(source, convert_options=options, parse_options=parse) as reader,
        parquet.ParquetWriter(target, reader.schema) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)
