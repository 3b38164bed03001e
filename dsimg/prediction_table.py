"""Predictions of any number of files as a CSV or Parquet table, written as they come; a stopped one goes on.

The rows go into OUT.partial in the order of the files. Every few seconds they are synced, and OUT.state.json is set to
how many there are and how long the file is: what a kill leaves beyond that is cut off, so that no row is there twice.
"""

import csv
import errno
import fcntl
import glob
import hashlib
import importlib
import importlib.util
import io
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from dsimg.errors import ConfigError, RunError
from dsimg.run import read_json, replacing, write_json

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


class PredictionTable:
    """A table that is being written. Columns: file, class, probability, class_2, ..., error."""

    def __init__(self, path: Path, files: Sequence[Path], *, asked: dict[str, Any], top: int) -> None:
        """Begin a table, or go on with one. `asked` is what its rows depend on besides the files.

        Raises RunError: it was begun with something else, or cannot be written.
        """
        self.path, self.top = path, top
        self._partial = path.with_name(f"{path.name}.partial")
        self._state = path.with_name(f"{path.name}.state.json")
        digest = hashlib.sha256()
        for file in files:
            digest.update(os.fsencode(file) + b"\0")
        self._asked = {**asked, "top": top, "files": digest.hexdigest()}
        self.rows = 0
        size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._state.exists():
                state = read_json(self._state)
                if state["asked"] != self._asked:
                    differing = [key for key, value in self._asked.items() if state["asked"].get(key) != value]
                    raise RunError(
                        f"{path} was begun with another {' and '.join(differing)}. Remove {self._state}, or choose "
                        "another --out."
                    )
                self.rows, size = state["rows"], state["bytes"]
            self._file = self._partial.open("r+b" if self._partial.exists() else "w+b")
            self._lock()
            self._file.truncate(size)
            self._file.seek(size)
        except OSError as error:
            raise RunError(f"cannot write {path}: {error.strerror}. Choose another --out.") from error
        if not size:
            names = [f"{kind}{'' if place == 1 else f'_{place}'}" for place in range(1, top + 1) for kind in KINDS]
            self._write(["file", *names, "error"])
        self._synced = time.monotonic()

    def add(self, file: Path, classes: Sequence[tuple[str, float]], error: str | None) -> None:
        """Write a row: the best classes with their probabilities, or why there are none. Raises RunError."""
        cells: list[str] = []
        for name, share in classes:
            cells += [name, f"{share:.6g}"]
        self._write([_text(file), *cells, *[""] * (2 * self.top - len(cells)), error or ""])
        self.rows += 1
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Make what has been written last. Raises RunError."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            write_json(self._state, {"asked": self._asked, "rows": self.rows, "bytes": self._file.tell()})
        except OSError as error:
            raise self._refused(error) from error
        self._synced = time.monotonic()

    def finish(self) -> None:
        """Give the table its name. Raises RunError."""
        self.sync()
        self._file.close()
        try:
            if self.path.suffix.lower() == ".parquet":
                with replacing(self.path) as temporary:
                    _to_parquet(self._partial, temporary)
                self._partial.unlink()
            else:
                self._partial.replace(self.path)
            self._state.unlink()
            for left in self.path.parent.glob(f".{glob.escape(self._state.name)}.*.tmp"):  # of a kill in `sync`
                left.unlink()
        except OSError as error:
            raise self._refused(error) from error

    def __enter__(self) -> "PredictionTable":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._file.closed:
            if kind is not RunError:  # stopped, by Ctrl-C for one: the rows so far are good
                self.sync()
            self._file.close()

    def _lock(self) -> None:
        """Keep other processes out. Raises RunError when one is in."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):  # else a file system without locks
                self._file.close()
                raise RunError(
                    f"another process is writing {self.path}. Wait for it, or choose another --out."
                ) from error

    def _write(self, cells: Sequence[str]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        try:
            self._file.write(text.getvalue().encode("utf-8"))
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write {self.path}: {error.strerror}. {self.rows} rows are kept; free some space, and the same "
            "command goes on."
        )


def is_finished(path: Path) -> bool:
    """Tell whether a table is there, whole."""
    return path.exists() and not path.with_name(f"{path.name}.state.json").exists()


def _text(file: Path) -> str:
    """Return a path as text: bytes of it that are none are written as backslashes."""
    return str(file).encode("utf-8", "backslashreplace").decode()


def _to_parquet(source: Path, target: Path) -> None:
    """Write a CSV table as Parquet, a block at a time."""
    pa: Any = importlib.import_module("pyarrow")
    pa_csv: Any = importlib.import_module("pyarrow.csv")
    parquet: Any = importlib.import_module("pyarrow.parquet")
    with source.open(encoding="utf-8", newline="") as stream:
        names = next(csv.reader(stream))
    types = {name: pa.float64() if name.startswith("probability") else pa.string() for name in names}
    options = pa_csv.ConvertOptions(column_types=types, strings_can_be_null=True, quoted_strings_can_be_null=True)
    parse = pa_csv.ParseOptions(newlines_in_values=True)
    with (
        pa_csv.open_csv(source, convert_options=options, parse_options=parse) as reader,
        parquet.ParquetWriter(target, reader.schema) as writer,
    ):
        for batch in reader:
            writer.write_batch(batch)
