"""What the routes of `dsimg serve` share: the models by name, the limits, and whether requests are taken."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from dsimg_export.server.errors import HttpError, RefusedError
from dsimg_export.server.limits import Room
from dsimg_export.server.model import Model
from dsimg_export.server.pool import Pool
from dsimg_export.server.stages import Stages
from dsimg_export.server.telemetry import Telemetry

if TYPE_CHECKING:  # an extra
    from dsimg_export.server.tracing import Tracing

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may ask for."""

    body_bytes: int
    bodies_bytes: int  # of all requests in hand
    body_seconds: float
    images: int
    deadline: float  # seconds, of a request that names none


@dataclass
class Server:
    """What the routes share: the models by name, and whether they are taken."""

    models: dict[str, Model]
    pool: Pool
    limits: Limits
    keys: tuple[bytes, ...] = ()
    say: Callable[[str], None] = print  # to whoever runs the server
    access_log: Callable[[str], None] | None = None  # takes a line for each request
    telemetry: Telemetry = field(default_factory=Telemetry)
    tracing: "Tracing | None" = None
    loaded: bool = False
    draining: bool = False

    def __post_init__(self) -> None:
        self.room = Room(self.limits.bodies_bytes)
        # One: while it is parsed, JSON takes several times its size in memory.
        self._parsing = ThreadPoolExecutor(1, thread_name_prefix="parse")
        self.telemetry.ready.set_function(lambda: self.ready)

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.loaded and not self.draining

    def model(self, name: str | None, version: str | None = None) -> Model:
        """Return a model by name; without one, the first. Raises HttpError."""
        if name is None:
            return next(iter(self.models.values()))
        model = self.models.get(name)
        if model is None:
            raise HttpError(404, f"Request for unknown model: '{name}' is not found", kind="unknown")
        if version is not None and version != model.version:
            raise HttpError(404, f"'{name}' version {version} is not found", kind="unknown")
        return model

    async def beside(self, work: Callable[[], T], *, deadline: float) -> T:
        """Return what `work` gives, from the thread that parses large bodies. Raises RefusedError past the deadline."""
        job = self._parsing.submit(work)
        future = asyncio.wrap_future(job)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits any more
        try:
            done, _ = await asyncio.wait([future], timeout=deadline - time.monotonic())
        finally:
            job.cancel()
        if not done:
            raise RefusedError("its deadline has passed", kind="deadline", retry_after=1.0)
        try:
            return future.result()
        finally:
            del future, job  # their error holds this frame, and that the body


# What a route is: the request, and what it tells where the time went.
Handler = Callable[[Server, Request, Stages], Awaitable[Response]]


def json_response(content: object, *, status: int = 200) -> Response:
    """Return JSON whose Content-Type is that and no more: KServe's client compares it."""
    body = json.dumps(content, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    return Response(body, status_code=status, headers={"content-type": "application/json"})
