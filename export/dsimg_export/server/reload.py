"""A run that is made anew in its folder, or a link that points to another one, takes the place of the one served."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from dsimg.errors import DsimgError
from dsimg.run import sha256
from dsimg_export.server.app import Server
from dsimg_export.server.model import Model

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

    load: verifies a run and warms it up, in a thread; where it raises, the old one goes on serving, and the new one is
    not tried again until it has changed. Requests that have the old one in hand are answered by it.
    """
    refused: dict[str, str] = {}
    while True:
        await sleep(seconds)
        for name, path in sources.items():
            mark = _mark(path)
            served = server.models[name]
            if mark is None or mark[: len(served.version)] == served.version or refused.get(name) == mark:
                continue
            say(f"{name}: {path} has a new run")
            try:
                fresh = await asyncio.to_thread(load, name, path)
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


def _mark(path: Path) -> str | None:
    """Return the hash of a run's run.json, which is written last; None while there is none."""
    try:
        return sha256(path / "run.json")
    except OSError:
        return None
