"""From a command line to a stage and an exit code. The same for every stage and every door.

Exit codes: 0 done, 2 the user can mend it, 75 stopped on request and resumable, anything else a bug.
"""

import contextlib
import dataclasses
import inspect
import os
import sys
import threading
import time
import tomllib
import traceback
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from dsimg.console import Chatter, Terminal
from dsimg.errors import ConfigError, DsimgError, StopRequested, near


class Context:
    """What the process a stage runs in knows: its terminal and where other libraries' output goes.

    A stage may add `explain`, which says what became of another rank when talking to it fails; `was_asked_to_end`,
    which tells whether a launcher's signal has come; and `at_exit`, which is called with the exit code and the last
    words when all has been said.
    """

    def __init__(self, terminal: Terminal, chatter: Chatter | None) -> None:
        self.terminal = terminal
        self.chatter = chatter
        self.explain: Callable[[], str | None] = lambda: None
        self.was_asked_to_end: Callable[[], bool] = lambda: False
        self.at_exit: Callable[[int, str], None] = lambda code, text: None


IN_PYTHON = "In Python:"  # begins what a stage's docstring says to who calls it, and not to who gives it flags
RECIPE = "--config FILE.toml takes flags from a file, a line `name = value` each; a flag of the command line wins."
_context: Context | None = None


def context() -> Context:
    """Return the command line's context, or a plain one when a stage is called from Python."""
    return _context or Context(Terminal(rank=int(os.environ.get("RANK", "0"))), None)


def run(stage: Callable[[Any], Any], argv: Sequence[str] | None = None) -> typing.NoReturn:
    """Parse `argv` into the stage's config, run the stage, and exit with its code."""
    global _context
    rank = int(os.environ.get("RANK", "0"))
    package = str(Path(__file__).resolve().parent)
    # `python dsimg/train.py` puts dsimg/ first on the path, where its files could hide other packages'; a user's
    # own --model package.module:function is looked up where the command was given.
    sys.path[:] = [str(Path.cwd()), *(entry for entry in sys.path if entry not in (package, ""))]
    _open_standard_streams()
    _context = Context(Terminal(rank=rank), None)
    code, text = 0, ""
    try:
        config = parse(stage, sys.argv[1:] if argv is None else argv, quiet=rank != 0)
        chatter = Chatter()
        _context = Context(Terminal(rank=rank, stream=chatter.stream), chatter)
        stage(config)
    except DsimgError as error:
        code, text = 2, f"error: {error}"
    except StopRequested as error:
        code, text = 75, str(error)
    except KeyboardInterrupt:
        code, text = 130, "interrupted"
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        code, text = _unexpected(error, _context)
    leave(code, text)


def _open_standard_streams() -> None:
    """Give the process the standard streams that it was started without (`>&-`, some schedulers)."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_WRONLY)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.dup(number), "w"))


_leaving = threading.Lock()


def leave(code: int, text: str = "") -> typing.NoReturn:
    """End the process with last words: from the main thread, or from one that finds it stuck. The first one counts."""
    if not _leaving.acquire(blocking=False):
        if code > 128:  # a second signal
            os._exit(code)
        threading.Event().wait()
    here = context()
    here.terminal.stop_live()
    if text:
        _complain(here, text, urgent=code in (75, 130))
    try:
        here.at_exit(code, text)
    except BaseException as error:
        _unexpected(error, here)
    if here.chatter is not None:
        here.chatter.stop()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # Not sys.exit: process groups and data workers of a rank that fails would wait for its peers.
    os._exit(code)


def _unexpected(error: BaseException, here: Context) -> tuple[int, str]:
    """Return the exit code and the text for an exception that is not a user's error; the log gets its traceback."""
    chatter = here.chatter
    trace = "".join(traceback.format_exception(error))
    if chatter is not None:
        with contextlib.suppress(OSError):  # a full disk must not hide what happened
            os.write(2, trace.encode(errors="backslashreplace"))
    # torch raises this at whatever line the main thread is when the kernel kills a decoding worker.
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return 2, f"error: {error} If memory ran out, give fewer --workers; the same command resumes the run."
    # What a rank sees of another's end, in gloo's and in NCCL's words.
    if any(sign in trace for sign in ("gloo/transport", "Connection closed by peer", "DistBackendError")):
        said = here.explain() or "another rank ended, and this one with it. What it said stands above or in its log."
        return 1, f"error: {said}"
    where = f" Log: {chatter.path}" if chatter is not None and chatter.has_place else ""
    return 1, f"{trace}This is a bug in dsimg, or in a library it uses; please report it.{where}"


def _complain(here: Context, text: str, *, urgent: bool) -> None:
    """Say `text` once for all ranks.

    An error that every rank meets is rank 0's to tell: its exit makes the launcher end the others. A rank that is
    still here after some seconds failed alone, and speaks for itself. Where it is `urgent` to go, only rank 0 speaks.
    """
    terminal = here.terminal
    if terminal.rank != 0:
        if urgent:
            return
        asked_before = here.was_asked_to_end()
        deadline = time.monotonic() + 3 + min(terminal.rank, 8)
        while time.monotonic() < deadline:
            if here.was_asked_to_end() and not asked_before:
                return
            time.sleep(0.1)
        text, terminal = f"rank {terminal.rank}: {text}", terminal.as_rank_zero()
    terminal.say(text)


def parse(stage: Callable[[Any], Any], argv: Sequence[str], *, quiet: bool = False) -> Any:
    """Return the stage's config from defaults < `--config recipe.toml` < flags.

    Launchers add `--local_rank`; DeepSpeed's own scripts pass a bare `--deepspeed`: both are taken and dropped.
    """
    config_type = config_type_of(stage)
    words: list[str] = []
    recipe: Path | None = None
    rest = iter(argv)
    for word in rest:
        name, _, value = word.partition("=")
        if name in ("--local_rank", "--local-rank"):
            if not value:
                next(rest, None)
        elif word == "--deepspeed":
            continue
        elif name == "--config":
            recipe = Path(value or next(rest, ""))
        else:
            words.append(word)
    flags = _recipe_flags(recipe, config_type) if recipe is not None else []
    return tyro.cli(
        config_type,
        args=[*flags, *words],
        prog=f"dsimg {stage.__name__}",
        description=_about(stage),
        use_underscores=True,
        console_outputs=not quiet,
    )


def _about(stage: Callable[[Any], Any]) -> str:
    """Return what --help says before the flags."""
    paragraphs = (inspect.getdoc(stage) or "").split("\n\n")
    return "\n\n".join([*(one for one in paragraphs if not one.startswith(IN_PYTHON)), RECIPE])


def config_type_of(stage: Callable[[Any], Any]) -> type[Any]:
    """Return the dataclass that a stage takes."""
    (parameter,) = inspect.signature(stage).parameters.values()
    found = typing.get_type_hints(stage)[parameter.name]
    assert isinstance(found, type)
    assert dataclasses.is_dataclass(found)
    return found


def _recipe_flags(path: Path, config_type: type[Any]) -> list[str]:
    """Turn a TOML recipe into flags, so that a value has one way of being checked."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}. Give --config a TOML file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe {path} is not TOML: {error}.") from error
    known = typing.get_type_hints(config_type)
    flags: list[str] = []
    for key, value in content.items():
        if key not in known:
            raise ConfigError(f"the recipe {path} has an unknown key '{key}'{near(key, known)}")
        if isinstance(value, bool) and known[key] is bool:
            flags.append(f"--{key}" if value else f"--no_{key}")
        elif isinstance(value, list):
            flags += [f"--{key}", *(str(item) for item in value)]
        else:
            flags += [f"--{key}", str(value)]
    return flags
