"""What surrounds a stage that is over in minutes: claiming its run folder, and doing nothing where it is finished.

A stage that was stopped is done again from its start by the same command.
"""

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from dsimg import cli
from dsimg.errors import DsimgError
from dsimg.run import Run, as_plain, hold_lock, nothing_to_do, write_labels, writing_in

FREE = ("out", "overwrite", "threads")

P = TypeVar("P")


class Config(Protocol):
    """What such a stage is asked."""

    @property
    def out(self) -> Path:
        """The run folder to write."""
        ...

    @property
    def overwrite(self) -> bool:
        """Whether to remove what is there."""
        ...


def run_short(
    config: Config,
    *,
    stage: str,
    parents: Sequence[Run],
    reads: Sequence[Path] = (),
    prepare: Callable[[], P],
    body: Callable[[Run, P], None],
) -> Run:
    """Run `body`, which writes the files of the run and finishes it, unless that was done; return the run.

    `prepare` opens what the body needs, before the folder is claimed; what is refused then, or by the body, leaves the
    folder to the command put right. Raises RunError as `Run.begin`, where the folder cannot be written, and where a run
    was begun with parents that have been made anew since.
    """
    path = config.out
    prepared = functools.cache(prepare)
    if _is_to_write(config):
        prepared()
        _is_to_write(config)  # another process may have begun it meanwhile, and --overwrite removes it
    run, state = Run.begin(
        path,
        stage=stage,
        config=as_plain(config),
        free=FREE,
        parents=parents,
        reads=reads,
        overwrite=config.overwrite,
    )
    if state != "new":
        Run.check_parents(path, [parent.path for parent in parents])
    if state == "finished":
        cli.context().terminal.say(nothing_to_do(path))
        return run
    with writing_in(path):
        hold_lock(path)
        if state == "unfinished":
            _remove_half_written(path)
    try:
        body(run, prepared())
    except DsimgError:
        run.withdraw()
        raise
    return Run.open(path)


def _is_to_write(config: Config) -> bool:
    """Tell whether --out is to be written, and lock what is there. A finished run stays as it is, but for --overwrite,
    and may lie where nothing can be written. Raises RunError."""
    path = config.out
    with writing_in(path):
        state = Run.state(path)
        if state == "finished" and not config.overwrite:
            return False
        if state != "new":
            hold_lock(path)
        return True


def _remove_half_written(path: Path) -> None:
    """Remove what a killed process was writing (`run.replacing`), which may be as large as the network."""
    for left in path.glob(".*.tmp"):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def copy_described(source: Run | None, out: Run, classes: Sequence[str]) -> None:
    """Bring along what later stages read: the list of images of `source`, where it has one, and the classes as text.

    Raises RunError.
    """
    if source is not None and source.has("index"):
        index = source.file("index")
        with writing_in(out.path):
            shutil.copyfile(index, out.path / "index.jsonl.gz")
    write_labels(out.path, classes)
