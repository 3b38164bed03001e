"""The routes of `dsimg serve`: images in, labels out, and the Open Inference Protocol v2 for everyone's clients."""

import asyncio
import functools
import json
import math
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import dsimg
from dsimg.errors import ImageError
from dsimg.metrics import best_classes
from dsimg_export.server import pages, protocol
from dsimg_export.server.batcher import Timing
from dsimg_export.server.errors import HttpError, RefusedError
from dsimg_export.server.json_text import LONG
from dsimg_export.server.limits import Room, check_key, read_body
from dsimg_export.server.model import Decoder, Model
from dsimg_export.server.telemetry import Telemetry, log_line, request_id_of, server_timing
from dsimg_export.server.uploads import Upload, read_uploads, takes_long
from dsimg_export.session import INPUT, OUTPUT

T = TypeVar("T")

NOT_FINITE = "the network gave NaN or infinity"
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
    decoder: Decoder
    limits: Limits
    keys: tuple[bytes, ...] = ()
    say: Callable[[str], None] = print  # to whoever runs the server
    access_log: Callable[[str], None] | None = None  # takes a line for each request
    telemetry: Telemetry = field(default_factory=Telemetry)
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
        return future.result()


Handler = Callable[[Server, Request, dict[str, float]], Awaitable[Response]]


def build_app(server: Server) -> Starlette:
    """Return the ASGI application of a server."""
    v2_model = "/v2/models/{name}"
    with_version = v2_model + "/versions/{version}"
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/predict", predict),
        ("POST", "/models/{name}/predict", predict),
        ("GET", "/models", models),
        ("GET", "/metrics", metrics),
        ("GET", "/v2", server_metadata),
        ("GET", "/v2/", server_metadata),
        ("GET", "/v2/health/live", live),
        ("GET", "/v2/health/ready", ready),
        ("GET", "/v2/models/stats", statistics),
        ("POST", "/v2/repository/index", repository_index),
    ]
    for place in (v2_model, with_version):
        table += [
            ("GET", place, model_metadata),
            ("GET", f"{place}/ready", model_ready),
            ("GET", f"{place}/config", model_config),
            ("GET", f"{place}/stats", statistics),
            ("POST", f"{place}/infer", infer),
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
        stages: dict[str, float] = {}
        request_id = request_id_of(request.headers.get("x-request-id"), lambda: uuid.uuid4().hex)
        try:
            if route not in OPEN:
                check_key(request, server.keys)
            response = await handler(server, request, stages)
        except HttpError as error:
            response = refusal(error)
            server.telemetry.errors.labels(error.kind).inc()
        except protocol.ProtocolError as error:
            response = refusal(HttpError(error.status, str(error), kind="request"))
            server.telemetry.errors.labels("request").inc()
        except asyncio.CancelledError:  # by uvicorn alone, once the time to end is over
            response = refusal(
                HttpError(503, "the server has ended before the answer", kind="ended", retry_after=1.0, close=True)
            )
            server.telemetry.errors.labels("ended").inc()
        except Exception:  # a bug: the client is told so, and whoever runs the server where
            server.say(f"request {request_id}: a bug in dsimg, please report it\n{traceback.format_exc()}")
            response = refusal(HttpError(500, f"a bug in the server; its log has it under {request_id}.", kind="bug"))
            server.telemetry.errors.labels("bug").inc()
        _finish(
            server,
            route,
            response,
            request_id=request_id,
            client=request.client.host if request.client else None,
            method=request.method,
            path=request.scope["path"],
            ms=round(1000 * (time.monotonic() - began), 2),
            **{f"{stage}_ms": round(1000 * value, 2) for stage, value in stages.items()},
        )
        return response

    return endpoint


def _finish(server: Server, route: str, response: Response, *, request_id: str, ms: float, **said: object) -> None:
    """Give an answer the headers that all have, and its place in metrics and log."""
    response.headers.update({**SECURITY, "x-request-id": request_id, "date": formatdate(usegmt=True)})
    if server.draining:
        response.headers["connection"] = "close"
    server.telemetry.requests.labels(route, response.status_code).inc()
    server.telemetry.seconds.labels(route).observe(ms / 1000)
    if server.access_log is not None:
        server.access_log(log_line(id=request_id, status=response.status_code, ms=ms, **said))


def _unrouted(server: Server) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Return what answers a request that no route takes."""

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        reason = HttpError(error.status_code, error.detail, kind="unknown")

        async def handler(server: Server, request: Request, stages: dict[str, float]) -> Response:
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
    _finish(server, NO_ROUTE, response, request_id=uuid.uuid4().hex, ms=0.0, client=client[0] if client else None)
    return response


def refusal(error: HttpError) -> Response:
    """Return an error as the protocol writes it."""
    response = json_response({"error": str(error)}, status=error.status)
    if error.retry_after is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.close:
        response.headers["connection"] = "close"
    return response


def json_response(content: object, *, status: int = 200) -> Response:
    """Return JSON whose Content-Type is that and no more: KServe's client compares it."""
    body = json.dumps(content, allow_nan=False, ensure_ascii=False).encode("utf-8", "replace")
    return Response(body, status_code=status, headers={"content-type": "application/json"})


def deadline_of(request: Request, limits: Limits) -> float:
    """Return when an answer is due, of `time.monotonic`, for a request whose body is there.

    The client may ask for less time, by X-Request-Timeout in seconds, not for more.
    """
    seconds = limits.deadline
    text = request.headers.get("x-request-timeout")
    if text is not None:
        try:
            asked = float(text)
        except ValueError:
            asked = math.nan
        if not asked > 0:
            raise HttpError(400, "X-Request-Timeout is a number of seconds above 0.", kind="request")
        seconds = min(seconds, asked)
    return time.monotonic() + seconds


# The images' own route


async def predict(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """POST /predict: the best classes of each image of the body; one that cannot be read fails alone."""
    model = server.model(request.path_params.get("name"))
    with model.in_use(), server.room.share() as take:
        return await _predict(server, model, request, stages, take)


async def _predict(
    server: Server, model: Model, request: Request, stages: dict[str, float], take: Callable[[int], None]
) -> Response:
    limits = server.limits
    top = _top(request, len(model.classes))
    began = time.monotonic()
    body = await read_body(request, limit=limits.body_bytes, seconds=limits.body_seconds, take=take)
    deadline = deadline_of(request, limits)
    kind = request.headers.get("content-type", "")
    read = functools.partial(read_uploads, body, kind, max_images=limits.images)
    uploads = await server.beside(read, deadline=deadline) if takes_long(body, kind) else read()
    stages["read"] = time.monotonic() - began
    rows, timing = await classify(server, model, [upload.data for upload in uploads], stages, deadline, request)
    answers = [
        _row(place, upload, row, model, top, server)
        for place, (upload, row) in enumerate(zip(uploads, rows, strict=True))
    ]
    failed = [answer for answer in answers if "error" in answer]
    content: dict[str, Any] = {"model": model.name, "version": model.version, "images": answers}
    if len(failed) == len(answers):
        content = {"error": failed[0]["error"] if len(failed) == 1 else "no image could be read", **content}
    response = json_response(content, status=400 if len(failed) == len(answers) else 200)
    response.headers["server-timing"] = server_timing(stages, batch=timing.batch)
    return response


async def classify(
    server: Server,
    model: Model,
    files: Sequence[bytes],
    stages: dict[str, float],
    deadline: float,
    request: Request,
) -> tuple[list[NDArray[np.float32] | str], Timing]:
    """Return the logits (C,) of each image file, or why it has none. Raises RefusedError, HttpError."""
    _admit(server, model, len(files), deadline)
    return await unless_gone(request, _classify(server, model, files, stages, deadline))


async def _classify(
    server: Server, model: Model, files: Sequence[bytes], stages: dict[str, float], deadline: float
) -> tuple[list[NDArray[np.float32] | str], Timing]:
    began = time.monotonic()
    decoded = await server.decoder.decode(files, model, deadline=deadline)
    stages["decode"] = time.monotonic() - began
    readable = [one for one in decoded if not isinstance(one, ImageError)]
    timing = Timing()
    logits: list[NDArray[np.float32]] = []
    if readable:
        found, timing = await model.logits(readable, deadline=deadline)
        logits = list(found)
        stages.update(queue=timing.queue, infer=timing.infer)
    for stage, seconds in stages.items():
        server.telemetry.stage_seconds.labels(model.name, stage).observe(seconds)
    outcomes = server.telemetry.images
    outcomes.labels(model.name, "answered").inc(len(readable))
    outcomes.labels(model.name, "bad").inc(len(decoded) - len(readable))
    rest = iter(logits)
    return [str(one) if isinstance(one, ImageError) else next(rest) for one in decoded], timing


def _admit(server: Server, model: Model, images: int, deadline: float) -> None:
    """Raise RefusedError where so many images cannot be answered in time, before anything is spent on them.

    Where nothing else is in hand they are tried, for what they take may have changed.
    """
    if not server.loaded:
        raise RefusedError("the server is not ready", kind="not ready", retry_after=1.0)
    waiting = server.decoder.waiting
    if waiting and waiting + images > model.plan.max_queue:
        raise RefusedError("Exceeds maximum queue size", kind="queue", retry_after=server.decoder.wait_for(0))
    # Decoding and the network run beside each other: the slower one sets the pace.
    slower = max(server.decoder.wait_for(images), model.batcher.wait_for(waiting + images))
    expected = slower + model.batcher.seconds_per_image
    if (waiting or model.batcher.busy) and time.monotonic() + expected > deadline:
        raise RefusedError(
            f"cannot be answered in time: about {expected:.2f} s are needed", kind="deadline", retry_after=expected
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


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _top(request: Request, classes: int) -> int:
    text = request.query_params.get("top", "5")
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise HttpError(400, "top is a whole number of classes above 0.", kind="request")
    return min(int(text[:9]), classes)


def _row(
    place: int, upload: Upload, row: NDArray[np.float32] | str, model: Model, top: int, server: Server
) -> dict[str, Any]:
    """Return what is said of one image."""
    said: dict[str, Any] = {"index": place}
    if upload.name is not None:
        said["name"] = upload.name
    reason = upload.error or (row if isinstance(row, str) else None)
    if reason is not None or isinstance(row, str):
        return {**said, "error": reason}
    best = best_classes(row, top)
    if best is None:
        return {**said, "error": NOT_FINITE}
    server.telemetry.confidence.labels(model.name).observe(best[0][1])
    return {**said, "classes": [{"class": model.classes[k], "index": k, "probability": share} for k, share in best]}


async def models(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """GET /models: what is served, and how it was made."""
    return json_response({"models": [model.card for model in server.models.values()]})


async def metrics(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """GET /metrics, for Prometheus."""
    return Response(server.telemetry.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


# Open Inference Protocol v2


async def server_metadata(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """GET /v2."""
    return json_response(protocol.server_metadata(dsimg.__version__))


async def live(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """GET /v2/health/live."""
    return json_response({"live": True, "ready": server.ready})


async def ready(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """GET /v2/health/ready: 200 or 503."""
    good = server.ready
    return json_response({"live": True, "ready": good}, status=200 if good else 503)


async def model_ready(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """GET /v2/models/M/ready."""
    model = _named(server, request)
    good = server.ready
    return json_response({"name": model.name, "ready": good}, status=200 if good else 503)


async def model_metadata(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """GET /v2/models/M."""
    model = _named(server, request)
    inputs, outputs = specs(model)
    properties = {"provider": model.plan.provider, "arch": str(model.served.run.model["arch"])}
    return json_response(
        protocol.metadata(
            model.name,
            versions=[model.version],
            platform="onnxruntime_onnx",
            inputs=inputs[:1],
            outputs=outputs,
            properties={**properties, "encoded_images": f"{INPUT} also takes image files, as BYTES [-1]"},
        )
    )


async def model_config(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """GET /v2/models/M/config, in the words of Triton's model configuration."""
    model = _named(server, request)
    inputs, outputs = specs(model)
    return json_response(
        {
            "name": model.name,
            "platform": "onnxruntime_onnx",
            "backend": "onnxruntime",
            "max_batch_size": server.limits.images,  # of a request, as Triton means it
            "input": [_config_tensor(inputs[0])],
            "output": [{**_config_tensor(outputs[0]), "label_filename": "labels.txt"}],
            "dynamic_batching": {"max_queue_delay_microseconds": round(1e6 * model.plan.max_delay)},
            "instance_group": [
                {"kind": "KIND_CPU" if model.plan.provider == "cpu" else "KIND_GPU", "count": model.plan.workers}
            ],
            "parameters": {"intra_op_thread_count": {"string_value": str(model.plan.threads)}},
        }
    )


async def statistics(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """GET /v2/models/stats and /v2/models/M/stats."""
    named = [_named(server, request)] if "name" in request.path_params else list(server.models.values())
    return json_response({"model_stats": [model.statistics() for model in named]})


async def repository_index(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """POST /v2/repository/index."""
    body = await read_body(request, limit=LONG, seconds=server.limits.body_seconds)
    ready_only = protocol.parse_index(body)
    return json_response(
        [
            {
                "name": model.name,
                "version": model.version,
                "state": "READY" if server.ready else "LOADING",
            }
            for model in server.models.values()
            if server.ready or not ready_only
        ]
    )


async def infer(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """POST /v2/models/M/infer: the network's own input, or encoded images as BYTES."""
    model = _named(server, request)
    with model.in_use(), server.room.share() as take:
        return await _infer(server, model, request, stages, take)


async def _infer(
    server: Server, model: Model, request: Request, stages: dict[str, float], take: Callable[[int], None]
) -> Response:
    limits = server.limits
    began = time.monotonic()
    body = await read_body(request, limit=limits.body_bytes, seconds=limits.body_seconds, take=take)
    there = time.monotonic()
    deadline = deadline_of(request, limits)
    encoding = request.headers.get("content-encoding", "")
    header_length = request.headers.get("inference-header-content-length")
    inputs, outputs = specs(model)

    def read() -> tuple[protocol.InferRequest, int]:
        whole = protocol.decompress(body, encoding, limit=limits.body_bytes) if encoding else body
        asked = protocol.parse_infer(
            whole,
            header_length=header_length,
            model=model.name,
            inputs=inputs,
            outputs=outputs,
            max_batch=limits.images,
        )
        return asked, len(whole)

    long = bool(encoding) or protocol.json_length(body, header_length) > LONG
    asked, size = await server.beside(read, deadline=deadline) if long else read()
    take(max(0, size - len(body)))
    stages["read"] = time.monotonic() - began
    timeout = asked.parameters.get("timeout", 0)  # of Triton's clients, in microseconds; 0: none
    if type(timeout) is not int or timeout < 0:
        raise protocol.ProtocolError("'timeout' must be a whole number of microseconds, from 0 on.")
    if timeout:
        deadline = min(deadline, there + timeout / 1e6)
    (tensor,) = asked.inputs
    if tensor.datatype == "BYTES":
        rows, _ = await classify(server, model, [bytes(data) for data in tensor.data], stages, deadline, request)
        for place, row in enumerate(rows):
            if isinstance(row, str):
                raise HttpError(400, f"image {place}: {row}", kind="image")
        logits = np.stack([row for row in rows if not isinstance(row, str)])
    else:
        _admit(server, model, len(tensor.data), deadline)
        logits, timing = await unless_gone(request, model.logits(list(tensor.data), deadline=deadline))
        stages.update(queue=timing.queue, infer=timing.infer)
    content, headers = protocol.answer_infer(
        asked, {OUTPUT: logits}, model=model.name, version=model.version, labels=model.classes
    )
    return Response(content, headers={**headers, "server-timing": server_timing(stages, batch=0)})


def specs(model: Model) -> tuple[list[protocol.TensorSpec], list[protocol.TensorSpec]]:
    """Return what a model takes and gives. Its input may also come as encoded images."""
    datatype = "UINT8" if model.takes_pixels else "FP32"
    return (
        [
            protocol.TensorSpec(name=INPUT, datatype=datatype, shape=(-1, *model.input_shape)),
            protocol.TensorSpec(name=INPUT, datatype="BYTES", shape=(-1,)),
        ],
        [protocol.TensorSpec(name=OUTPUT, datatype="FP32", shape=(-1, len(model.classes)))],
    )


def _named(server: Server, request: Request) -> Model:
    return server.model(request.path_params["name"], request.path_params.get("version"))


def _config_tensor(spec: protocol.TensorSpec) -> Mapping[str, Any]:
    return {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": list(spec.shape[1:])}
