"""A run that is made anew in its folder, or a link that points to another one, takes the place of the one served."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from dsimg.errors import DsimgError
from dsimg.run import sha256
from dsimg_export.server.model import Model
from dsimg_export.server.state import Server

SECONDS = 2.0  # between two looks at a folder


async def watch(
    server: Server,
    sources: Mapping[str, Path],
    *,
    load: Callable[[str, Path], Model],
    say: Callable[[str], None],
    seconds: float = SECONDS,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Look at the runs for ever, and put what is new in place of what is served.

    load: verifies a run and warms it up, in a thread that nobody waits for at the end. Where it raises, the old one
    goes on serving, and the new one is not tried again until it has changed. Requests that have the old one in hand are
    answered by it.
    """
    refused: dict[str, str] = {}
    stamps: dict[str, tuple[int, ...]] = {}
    while True:
        await sleep(seconds)
        for name, path in sources.items():
            stamp = _stamp(path)
            if stamp is None or stamps.get(name) == stamp:
                continue
            stamps[name] = stamp
            mark = hash_of(path)
            served = server.models[name]
            if mark is None or mark[: len(served.version)] == served.version or refused.get(name) == mark:
                continue
            say(f"{name}: {path} has a new run")
            try:
                fresh = await _in_thread(load, name, path)
            except Exception as error:  # whatever is in the folder, the server goes on
                refused[name] = mark
                server.telemetry.errors.labels("reload").inc()
                reason = str(error) if isinstance(error, DsimgError) else repr(error)
                say(f"{name}: it is refused, and version {served.version} goes on serving: {reason}")
                continue
            server.models[name] = fresh
            say(f"{name}: version {fresh.version} serves in place of {served.version}")
            await served.retire()
            server.telemetry.info.remove(name, served.version)
            del served, fresh  # else the old one's sessions stay in memory until the next one comes


def hash_of(path: Path) -> str | None:
    """Return the hash of a run's run.json, which is written last; None while there is none."""
    try:
        return sha256(path / "run.json")
    except OSError:
        return None


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return what changes wherever run.json does, without reading it."""
    try:
        found = (path / "run.json").stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


async def _in_thread(load: Callable[[str, Path], Model], name: str, path: Path) -> Model:
    """Return what `load` gives, from a daemon thread."""
    future: concurrent.futures.Future[Model] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(load(name, path))
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()
    threading.Thread(target=work, name="load", daemon=True).start()
    return await asyncio.wrap_future(future)
