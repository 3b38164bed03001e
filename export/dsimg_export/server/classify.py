"""From a request to its answers: its body is read and parsed, its images go to the model.

It ends where its client goes.
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from numpy.typing import NDArray
from starlette.requests import Request

from dsimg.errors import ImageError
from dsimg_export.server.errors import HttpError, RefusedError
from dsimg_export.server.limits import read_body
from dsimg_export.server.model import Answer, Model
from dsimg_export.server.protocol import decompress
from dsimg_export.server.stages import Stages
from dsimg_export.server.state import Limits, Server

T = TypeVar("T")
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
    stages: Stages,
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
    stages.read(began, time.monotonic())
    return parsed, there, deadline


async def classify(
    server: Server,
    model: Model,
    images: Sequence[bytes] | Sequence[NDArray[Any]],
    stages: Stages,
    deadline: float,
    request: Request,
) -> list[Answer | ImageError]:
    """Return what the network says of each image, or why its file cannot be read. Raises RefusedError, HttpError."""
    if not server.loaded:
        raise RefusedError("the server is not ready", kind="not ready", retry_after=1.0)
    async with while_there(request):
        rows = await model.batcher.submit(images, deadline=deadline, stages=stages)
    telemetry = server.telemetry
    for stage, seconds in stages.seconds.items():
        telemetry.stage_seconds.labels(model.name, stage).observe(seconds)
    for row in rows:
        if isinstance(row, ImageError):
            outcome = "bad"
        elif row.top is None:
            outcome = "not finite"
        else:
            outcome = "answered"
            telemetry.confidence.labels(model.name).observe(row.top[0][1])
        telemetry.images.labels(model.name, outcome).inc()
    return rows


@contextlib.asynccontextmanager
async def while_there(request: Request) -> AsyncIterator[None]:
    """End what is done in it where the client goes. Raises HttpError then."""
    task = asyncio.current_task()
    assert task is not None
    inside, ended = True, False

    def end(gone: "asyncio.Task[None]") -> None:
        nonlocal ended
        if inside and not gone.cancelled():
            ended = True
            task.cancel()

    gone = asyncio.ensure_future(_gone(request))
    gone.add_done_callback(end)
    try:
        yield
    except asyncio.CancelledError:
        if not ended or task.uncancel() > 0:
            raise
        raise HttpError(499, "the client is gone.", kind="gone", close=True) from None
    finally:
        inside = False
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
