"""The application of `dsimg serve`: its table of routes, and what all answers have in common."""

import asyncio
import functools
import math
import time
import traceback
from collections.abc import Awaitable, Callable
from email.utils import formatdate

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dsimg_export.server import images, pages, protocol, v2
from dsimg_export.server.errors import HttpError
from dsimg_export.server.limits import check_key
from dsimg_export.server.stages import Stages
from dsimg_export.server.state import Handler, Server, json_response
from dsimg_export.server.telemetry import log_line, request_id_of

# What any answer carries: nothing here is to be framed, sniffed, or to load from elsewhere.
SECURITY = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'",
}
NO_ROUTE = "none"
# Asked by orchestrators, which have no key, and by browsers, whose page asks its reader for one.
OPEN = ("/v2/health/live", "/v2/health/ready", *pages.PAGES, NO_ROUTE)


def build_app(server: Server) -> Starlette:
    """Return the ASGI application of a server."""
    v2_model = "/v2/models/{name}"
    with_version = v2_model + "/versions/{version}"
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/predict", images.predict),
        ("POST", "/models/{name}/predict", images.predict),
        ("GET", "/models", images.models),
        ("GET", "/metrics", metrics),
        ("GET", "/v2", v2.server_metadata),
        ("GET", "/v2/", v2.server_metadata),
        ("GET", "/v2/health/live", v2.live),
        ("GET", "/v2/health/ready", v2.ready),
        ("GET", "/v2/models/stats", v2.statistics),
        ("POST", "/v2/repository/index", v2.repository_index),
    ]
    for place in (v2_model, with_version):
        table += [
            ("GET", place, v2.model_metadata),
            ("GET", f"{place}/ready", v2.model_ready),
            ("GET", f"{place}/config", v2.model_config),
            ("GET", f"{place}/stats", v2.statistics),
            ("POST", f"{place}/infer", v2.infer),
        ]
    table += [("GET", path, pages.handler(*page)) for path, page in pages.PAGES.items()]
    routes = [Route(path, _answering(server, path, handler), methods=[method]) for method, path, handler in table]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unrouted(server)})
    app.router.redirect_slashes = False  # a path with a slash too many gets an error to read, not an empty answer
    return app


def _answering(server: Server, route: str, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint: a handler with the key asked for, its errors as answers, and its place in metrics and log."""

    async def endpoint(request: Request) -> Response:
        began = time.monotonic()
        request_id = request_id_of(request.headers.get("x-request-id"))
        span = None if server.tracing is None else server.tracing.begin(server, route, request, request_id)
        stages = Stages()
        refused: HttpError | None = None
        try:
            if route not in OPEN:
                check_key(request, server.keys)
            response = await handler(server, request, stages)
        except HttpError as error:
            refused = error
        except protocol.ProtocolError as error:
            refused = HttpError(error.status, str(error), kind="request")
        except asyncio.CancelledError:  # by uvicorn alone, once the time to end is over
            refused = HttpError(
                503, "the server has ended before the answer", kind="ended", retry_after=1.0, close=True
            )
        except Exception:  # a bug: the client is told so, and whoever runs the server where
            server.say(f"request {request_id}: a bug in dsimg, please report it\n{traceback.format_exc()}")
            refused = HttpError(500, f"a bug in the server; its log has it under {request_id}.", kind="bug")
        if refused is not None:
            response = refusal(refused)
            server.telemetry.errors.labels(refused.kind).inc()
        if span is not None:
            span.end(response, refused, stages)
        _finish(
            server,
            route,
            response,
            request_id=request_id,
            client=request.client.host if request.client else None,
            method=request.method,
            path=request.scope["path"],
            ms=round(1000 * (time.monotonic() - began), 2),
            **{f"{stage}_ms": round(1000 * value, 2) for stage, value in stages.seconds.items()},
            **({} if span is None else span.ids),
        )
        return response

    return endpoint


def _finish(server: Server, route: str, response: Response, *, request_id: str, ms: float, **said: object) -> None:
    """Give an answer the headers that all have, and its place in metrics and log."""
    response.headers.update({**SECURITY, "x-request-id": request_id, "date": _date(int(time.time()))})
    if server.draining:
        response.headers["connection"] = "close"
    server.telemetry.requests.labels(route, response.status_code).inc()
    server.telemetry.seconds.labels(route).observe(ms / 1000)
    if server.access_log is not None:
        server.access_log(log_line(id=request_id, status=response.status_code, ms=ms, **said))


@functools.lru_cache(maxsize=1)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)


def _unrouted(server: Server) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return what answers a request that no route takes."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"][:200]
        text = {
            404: f"there is no {path} here; GET /docs lists what there is.",
            405: f"{path} is not there for {request.method}; GET /docs lists what there is.",
        }
        reason = HttpError(error.status_code, text.get(error.status_code, error.detail), kind="unknown")

        async def handler(server: Server, request: Request, stages: Stages) -> Response:
            raise reason

        response = await _answering(server, NO_ROUTE, handler)(request)
        response.headers.update(error.headers or {})
        return response

    return answer


def unrouted(server: Server, error: HttpError, *, client: tuple[str, int] | None) -> Response:
    """Return the answer to what never became a request; the connection ends with it."""
    response = refusal(error)
    response.headers["connection"] = "close"
    server.telemetry.errors.labels(error.kind).inc()
    _finish(server, NO_ROUTE, response, request_id=request_id_of(None), ms=0.0, client=client[0] if client else None)
    return response


def refusal(error: HttpError) -> Response:
    """Return an error as the protocol writes it."""
    response = json_response({"error": str(error)}, status=error.status)
    if error.retry_after is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 415:
        response.headers["accept-encoding"] = "gzip, deflate"
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.close:
        response.headers["connection"] = "close"
    return response


async def metrics(server: Server, request: Request, stages: Stages) -> Response:
    """GET /metrics, for Prometheus."""
    return Response(server.telemetry.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
