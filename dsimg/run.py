"""The run folder: the one noun that passes between stages.

A stage begins a run, writes its files into it, and finishes it by writing `run.json` last. A run without
`run.json` is unfinished. Nothing here imports torch.
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import dsimg
from dsimg.errors import RunError

SCHEMA = 1

# What each role is called on disk, and the command that makes it: what `Run.file` says when it is missing.
ROLES = {
    "config": ("config.json", "dsimg train"),
    "ds_config": ("ds_config.json", "dsimg train"),
    "index": ("index.jsonl.gz", "dsimg train"),
    "weights": ("weights.safetensors", "dsimg train"),
    "pruning": ("pruning.json", "dsimg prune"),
    "labels": ("labels.txt", "dsimg train"),
    "metrics": ("metrics.jsonl", "dsimg train"),
    "model": ("model.onnx", "dsimg export"),
    "reduced": ("model_reduced.onnx", "dsimg quantize"),
    "calibration": ("calibration.json", "dsimg quantize"),
    "golden": ("golden.safetensors", "dsimg export"),
    "evaluation": ("evaluation.json", "dsimg evaluate"),
    "predictions": ("predictions.csv", "dsimg evaluate"),
}

State = Literal["new", "unfinished", "finished"]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name beside `path` to write to; afterwards fsync and rename, so that no reader sees half a file.

    What goes wrong is raised as it is, and leaves neither a temporary file nor a changed `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync_file(temporary)
        temporary.replace(path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole or not at all. Raises RunError."""
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}. Free some space or choose another --out.") from error


@contextlib.contextmanager
def writing_in(out: Path) -> Iterator[None]:
    """Raise RunError with the remedy where the folder that --out names, or what is below it, cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot write in --out {out}: {error.strerror or error}. Choose another --out.") from error


def make_folder(out: Path) -> Path:
    """Make the folder that --out names for files that are no run of their own, and return it.

    Raises RunError: it is a run, whose own files would be replaced, or it cannot be made or written.
    """
    remedy = "Choose another --out."
    try:
        if any((out / name).exists() for name in ("run.json", "config.json")):
            raise RunError(f"{out} is a run folder, whose files would be replaced. {remedy}")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {out}: {error.strerror}. {remedy}") from error
    if not os.access(out, os.W_OK):
        raise RunError(f"cannot write into {out}: it is read-only for this user. {remedy}")
    return out


def sync_folder(path: Path) -> None:
    """Make renames in a folder last through a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically. NaN and infinity are refused: they are not JSON."""
    write_atomically(path, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode())


def as_plain(value: Any) -> Any:
    """Return a config, or a part of one, as JSON keeps it: paths are text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [as_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def write_labels(folder: Path, classes: Sequence[str]) -> None:
    """Write `labels.txt`: a class a line; line n is logit n. Raises RunError."""
    text = "".join(f"{name}\n" for name in classes)
    write_atomically(folder / "labels.txt", text.encode("utf-8", "surrogateescape"))


def nothing_to_do(path: Path) -> str:
    """Return what is said of a run that the same command has finished."""
    return f"{path} is a finished run of this very config: nothing to do. --overwrite makes it again."


def sha256(path: Path) -> str:
    """Return the hex digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Read once, while there is one thread: it can only be read by being set.
_UMASK = os.umask(0o077)
os.umask(_UMASK)


def sync_file(path: Path) -> None:
    """Make a file that a library wrote last through a power cut, with the rights of any that Python writes: safetensors
    makes its files the owner's alone. Raises OSError."""
    path.chmod(0o666 & ~_UMASK)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


_locks: list[int] = []  # descriptors that are kept open until the process ends, however it ends


def hold_lock(path: Path) -> None:
    """Keep other processes out of a run folder for as long as this one lives.

    Raises RunError when one is in it, OSError where the folder may not be written.
    """
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise RunError(
                f"another process is writing the run {path}. Wait for it, or choose another --out."
            ) from error
        return  # a file system without locks
    _locks.append(descriptor)


def git_commit() -> str | None:
    """Return the commit of the checkout that dsimg runs from, or None outside a checkout."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


class Run:
    """One run folder. `manifest` is the content of `run.json`, or None while the run is unfinished."""

    def __init__(self, path: Path, manifest: dict[str, Any] | None) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def begin(
        cls,
        path: Path,
        *,
        stage: str,
        config: Mapping[str, Any],
        free: Sequence[str] = (),
        parents: Sequence["Run"] = (),
        reads: Sequence[Path] = (),
        overwrite: bool = False,
    ) -> tuple["Run", State]:
        """Claim `path` for a stage's run and write its `config.json`.

        `config` is JSON-able; `free` names its keys that may differ when the same run is started again. `parents` are
        the runs that this one reads, as they are now; `reads` are other files and folders that it reads, which must
        not lie in `path`, nor `path` in them.
        Raises RunError when the folder holds something else: another stage, another config, no run at all; and where
        it cannot be made, or removed.
        """
        state = cls.state(path)
        here = path.resolve()
        for other in (*(run.path.resolve() for run in parents), *(read.resolve() for read in reads)):
            if other == here or here in other.parents or other in here.parents:
                raise RunError(
                    f"--out {path} and {other}, which the run reads, lie in one another. Choose another --out."
                )
        if state != "new" and overwrite:
            with writing_in(path):
                remove_run(path.resolve())
            state = "new"
        if state != "new":
            stored = read_json(path / "config.json")
            differing = _differences(stored, {"stage": stage, **config}, free=("parents", *free))
            if differing:
                raise RunError(
                    f"{path} holds a run with another config: {'; '.join(differing)}. Choose another --out, give "
                    "the same flags again, or --overwrite to replace it."
                )
            manifest = read_json(path / "run.json") if state == "finished" else None
            return cls(path, manifest), state
        with writing_in(path):
            path.resolve().mkdir(parents=True, exist_ok=True)  # resolved: a link may lead to what is not there yet
        ancestry = [{"path": str(run.path), "sha256": sha256(run.path / "run.json")} for run in parents]
        write_json(path / "config.json", {"stage": stage, "parents": ancestry, **config})
        return cls(path, None), state

    @classmethod
    def was_begun_by(cls, path: Path, *, stage: str, config: Mapping[str, Any], free: Sequence[str]) -> bool:
        """Tell whether `path` holds an unfinished run of this very config, but for the keys in `free`."""
        if cls.state(path) != "unfinished":
            return False
        try:
            stored = read_json(path / "config.json")
        except RunError:
            return False
        return not _differences(stored, {"stage": stage, **config}, free=("parents", *free))

    @staticmethod
    def state(path: Path) -> State:
        """Tell what `path` is: "new" (nothing there), "unfinished" or "finished". Raises RunError for a stranger."""
        if not path.exists():
            return "new"
        if not path.is_dir():
            raise RunError(f"--out {path} is a file. Choose a folder.")
        if (path / "run.json").exists():
            return "finished"
        if (path / "config.json").exists():
            return "unfinished"
        if (path / "checkpoints").is_dir():
            raise RunError(f"the run {path} has lost its config.json. Copy it back, or choose another --out.")
        if any(entry.name != "logs" and not entry.name.endswith(".tmp") for entry in path.iterdir()):
            raise RunError(f"--out {path} is a folder that holds something other than a run. Choose another --out.")
        return "new"

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open a finished run. Raises RunError that says what is there instead."""
        if not path.is_dir():
            raise RunError(f"there is no run folder {path} (from {Path.cwd()}). Check the path.")
        manifest = path / "run.json"
        if not manifest.exists():
            found = sorted(entry.name for entry in path.iterdir())
            if "config.json" in found:
                raise RunError(f"the run {path} is unfinished: give the command that started it again to resume it.")
            raise RunError(
                f"{path} is not a run folder: it has no run.json (it holds {', '.join(found[:5]) or 'nothing'})."
            )
        content = read_json(manifest)
        if content.get("schema") != SCHEMA:
            raise RunError(
                f"{manifest} has schema {content.get('schema')}, this dsimg {dsimg.__version__} reads schema {SCHEMA}. "
                "Use the dsimg version named in it."
            )
        return cls(path, content)

    @staticmethod
    def check_parents(path: Path, parents: Sequence[Path]) -> None:
        """Raise RunError where one of these, which the run in `path` began with, has been made anew."""
        for parent in read_json(path / "config.json")["parents"]:
            manifest = Path(parent["path"]) / "run.json"
            known = Path(parent["path"]) in parents
            if known and manifest.exists() and sha256(manifest) != parent["sha256"]:
                raise RunError(
                    f"{parent['path']} is not the run that {path} began with: it has been made anew since. Start anew "
                    "with --overwrite, or choose another --out."
                )

    def has(self, role: str) -> bool:
        """Tell whether the run lists a file with this role."""
        return role in (self.manifest or {}).get("files", {})

    def file(self, role: str) -> Path:
        """Return the verified path of the file with this role. Raises RunError when missing or changed."""
        name, maker = ROLES[role]
        recorded = (self.manifest or {}).get("files", {}).get(role)
        if recorded is None:
            here = ", ".join(sorted((self.manifest or {}).get("files", {}))) or "nothing"
            raise RunError(f"the run {self.path} has no {role} ({name}); it has: {here}. `{maker}` makes it.")
        path = self.path / str(recorded["path"])
        if not path.exists():
            raise RunError(f"{path} is missing, though run.json lists it. Copy it back, or run the stage again.")
        if path.stat().st_size != recorded["bytes"] or sha256(path) != recorded["sha256"]:
            raise RunError(f"{path} is damaged: its hash is not the one in run.json. Copy it again from its source.")
        return path

    def finish(self, *, seed: int | None, model: Mapping[str, Any], metrics: Any) -> None:
        """Write `run.json`: hash every file of the run that has a role, and mark the stage as finished."""
        files = {
            role: {
                "path": name,
                "sha256": sha256(self.path / name),
                "bytes": (self.path / name).stat().st_size,
            }
            for role, (name, _) in ROLES.items()
            if (self.path / name).exists()
        }
        begun = read_json(self.path / "config.json")
        self.manifest = {
            "schema": SCHEMA,
            "stage": begun["stage"],
            "dsimg": dsimg.__version__,
            "git_commit": git_commit(),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seed": seed,
            "parents": begun["parents"],
            "model": dict(model),
            "files": files,
            "metrics": metrics,
        }
        write_json(self.path / "run.json", self.manifest)

    def withdraw(self) -> None:
        """Give an unfinished run's folder up again, where its stage refused: another config may then have it.

        A finished run stays. So does what cannot be removed, in silence: the user is to hear why the stage refused.
        """
        with contextlib.suppress(OSError):
            if (self.path / "run.json").exists():
                return
            for name in (*(name for name, _ in ROLES.values()), ".lock"):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()

    @property
    def model(self) -> dict[str, Any]:
        """The manifest's model block: arch, num_classes, classes, preprocess."""
        assert self.manifest is not None
        return dict(self.manifest["model"])


def remove_run(folder: Path) -> None:
    """Remove a run. It is renamed first: a kill meanwhile must not leave half of one.

    What cannot be removed then is left to the next call. Raises OSError: a folder that can be neither renamed nor
    emptied.
    """
    aside = folder.with_name(f".{folder.name}.overwritten")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        folder.rename(aside)
    except OSError:  # a mount point stays where it is
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    else:
        shutil.rmtree(aside, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises RunError when there is none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}. Restore it, or start the run anew with --overwrite.") from error
    if not isinstance(content, dict):
        raise RunError(f"{path} does not hold a JSON object. Restore it, or start the run anew with --overwrite.")
    return content


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], *, free: Sequence[str]) -> list[str]:
    """List the keys whose values differ, as text. Compared as JSON, so that a tuple equals its list."""
    as_json = json.loads(json.dumps(new))
    return [
        f"{key} was {old.get(key)!r}, now {as_json.get(key)!r}"
        for key in sorted(old.keys() | as_json.keys())
        if key not in free and old.get(key) != as_json.get(key)
    ]
