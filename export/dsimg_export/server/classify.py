"""From a request to its logits: its body read and parsed, admitted or refused at once, its images decoded beside the
network, ended where the client goes."""

import asyncio
import math
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from dsimg.errors import ImageError
from dsimg_export.server.batcher import Timing
from dsimg_export.server.errors import HttpError, RefusedError
from dsimg_export.server.limits import read_body
from dsimg_export.server.model import Model
from dsimg_export.server.protocol import decompress
from dsimg_export.server.state import Limits, Server

T = TypeVar("T")
# How many times as long as expected the wait may be, and the answer still in time. Without it the queue grows until
# half of what is admitted comes late: decoded, and perhaps run, for nothing.
MARGIN = 2.0
NUMBER = re.compile(r"[0-9.eE+-]+")  # float() also takes inf, 1_000 and blanks


def _seconds_for(request: Request, limits: Limits) -> float:
    """Return the seconds in which a request is to be answered, once its body is there.

    The client may ask for less time, by X-Request-Timeout in seconds, not for more.
    """
    seconds = limits.deadline
    text = request.headers.get("x-request-timeout")
    if text is not None:
        try:
            asked = float(text)
        except ValueError:
            asked = math.nan
        if not (NUMBER.fullmatch(text) and asked > 0):
            raise HttpError(400, "X-Request-Timeout is a number of seconds above 0.", kind="request")
        seconds = min(seconds, asked)
    return seconds


async def read_request(
    server: Server,
    request: Request,
    stages: dict[str, float],
    take: Callable[[int], None],
    *,
    parse: Callable[[bytes], T],
    takes_long: Callable[[bytes], bool],
) -> tuple[T, float, float]:
    """Return what `parse` makes of a request's unpacked body, when that was there, and when the answer is due.

    take: told of the bytes that are held. takes_long: whether parsing a body would hold others up. Raises HttpError,
    RefusedError, ProtocolError, and what `parse` raises.
    """
    limits = server.limits
    began = time.monotonic()
    body = await read_body(request, limit=limits.body_bytes, seconds=limits.body_seconds, take=take)
    there = time.monotonic()
    deadline = there + _seconds_for(request, limits)
    encoding = request.headers.get("content-encoding", "")

    def work() -> tuple[T, int]:
        whole = decompress(body, encoding, limit=limits.body_bytes) if encoding else body
        return parse(whole), len(whole)

    parsed, size = await server.beside(work, deadline=deadline) if encoding or takes_long(body) else work()
    take(max(0, size - len(body)))
    stages["read"] = time.monotonic() - began
    return parsed, there, deadline


async def classify(
    server: Server,
    model: Model,
    files: Sequence[bytes],
    stages: dict[str, float],
    deadline: float,
    request: Request,
) -> tuple[list[NDArray[np.float32] | str], Timing]:
    """Return the logits (C,) of each image file, or why it has none. Raises RefusedError, HttpError."""
    admit(server, model, len(files), deadline)
    return await unless_gone(request, _classify(server, model, files, stages, deadline))


async def _classify(
    server: Server, model: Model, files: Sequence[bytes], stages: dict[str, float], deadline: float
) -> tuple[list[NDArray[np.float32] | str], Timing]:
    began = time.monotonic()
    decoded = await server.decoder.decode(files, model, deadline=deadline)
    stages["decode"] = time.monotonic() - began
    telemetry = server.telemetry
    readable = [one for one in decoded if not isinstance(one, ImageError)]
    for one in readable:
        telemetry.decoded.labels(model.name, one.format, one.mode, "yes" if one.rotated else "no").inc()
    timing = Timing()
    logits, finite = iter(()), 0
    if readable:
        found, timing = await model.logits([one.pixels for one in readable], deadline=deadline)
        logits, finite = iter(found), int(np.isfinite(found).all(axis=1).sum())
        stages.update(queue=timing.queue, infer=timing.infer)
    for stage, seconds in stages.items():
        telemetry.stage_seconds.labels(model.name, stage).observe(seconds)
    outcomes = telemetry.images
    outcomes.labels(model.name, "answered").inc(finite)
    outcomes.labels(model.name, "not finite").inc(len(readable) - finite)
    outcomes.labels(model.name, "bad").inc(len(decoded) - len(readable))
    return [str(one) if isinstance(one, ImageError) else next(logits) for one in decoded], timing


def admit(server: Server, model: Model, images: int, deadline: float, *, decodes: bool = True) -> None:
    """Raise RefusedError where so many images cannot be answered in time, before anything is spent on them.

    Where nothing else is in hand they are tried, for what they take may have changed. decodes: whether they are files.
    """
    if not server.loaded:
        raise RefusedError("the server is not ready", kind="not ready", retry_after=1.0)
    decoder, batcher = server.decoder, model.batcher
    waiting = decoder.waiting if decodes else 0
    if waiting and waiting + images > model.plan.max_queue:
        raise RefusedError("Exceeds maximum queue size", kind="queue", retry_after=decoder.wait_for(0))
    # Decoding and the network run beside each other: the slower one sets the pace.
    ahead = max(decoder.wait_for(images) if decodes else 0.0, batcher.wait_for(waiting + images))
    needed = MARGIN * ahead + batcher.seconds_per_image
    if (waiting or batcher.busy) and time.monotonic() + needed > deadline:
        raise RefusedError(
            f"cannot be answered in time: up to {needed:.2f} s are needed", kind="deadline", retry_after=ahead
        )


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` gives; end it where the client goes. Raises HttpError then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HttpError(499, "the client is gone.", kind="gone", close=True)
    finally:
        task.cancel()
        gone.cancel()
        del task  # its error holds this frame: the body would stay until the garbage collector comes


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
