"""OpenTelemetry traces: a span for each request, which continues its caller's trace, and one in it for each stage.

Where they go, and how many of them, is said by OpenTelemetry's own environment variables. The attributes of HTTP are
those of its stable conventions for servers (opentelemetry.io/docs/specs/semconv/http/http-spans); `dsimg.` has the
others. This file alone imports OpenTelemetry, which is an extra: it is imported where traces are asked for.
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import Request
from starlette.responses import Response

import dsimg
from dsimg.errors import ConfigError
from dsimg_export.server.errors import HttpError
from dsimg_export.server.stages import Stages
from dsimg_export.server.state import Server

# Asked every few seconds by orchestrators and Prometheus: their spans would be most of all there are.
UNTRACED = ("/metrics", "/v2/health/live", "/v2/health/ready")
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH"))
LONGEST = 1024  # characters of what a client wrote
QUIET_SECONDS = 60.0  # after each time that OpenTelemetry has said something


class Tracing:
    """Makes the spans of a server's requests. `open_tracing` makes one that sends them."""

    def __init__(self, provider: TracerProvider, *, goes_to: str = "") -> None:
        self.goes_to = goes_to
        self._provider = provider
        self._tracer = provider.get_tracer("dsimg.serve", dsimg.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, server: Server, route: str, request: Request, request_id: str) -> "RequestSpan | None":
        """Return the span of a request that begins; None for one that is not traced."""
        if route in UNTRACED:
            return None
        known = request.method if request.method in METHODS else "_OTHER"
        has_route = route.startswith("/")
        name = "HTTP" if known == "_OTHER" else known
        clock = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            f"{name} {route}" if has_route else name,
            context=self._propagator.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": known,
                **({} if known == request.method else {"http.request.method_original": request.method}),
                **({"http.route": route} if has_route else {}),
                **_said_by_client(request),
                **_model(server, route, request),
                "dsimg.request_id": request_id,
            },
            start_time=clock + time.monotonic_ns(),
        )
        return RequestSpan(self._tracer, span, clock)

    def close(self, seconds: float) -> bool:
        """Send what has not been sent, for so many seconds at most; tell whether that came to an end."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)  # which itself waits for 30 s
        ending.start()
        ending.join(seconds)
        return not ending.is_alive()


class RequestSpan:
    """The span of one request."""

    def __init__(self, tracer: Any, span: Any, clock: int) -> None:
        self._tracer, self._span = tracer, span
        self._clock = clock  # nanoseconds from time.monotonic_ns() to time.time_ns()

    @property
    def ids(self) -> dict[str, str]:
        """What joins a line of a log to the span, named as OpenTelemetry names it in logs."""
        context = self._span.get_span_context()
        return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}

    def end(self, response: Response, refused: HttpError | None, stages: Stages) -> None:
        """End the span with the answer, the stages in it, and why there was no better one."""
        span, status = self._span, response.status_code
        if span.is_recording():
            inside = set_span_in_context(span)
            for one in stages.intervals:
                began, ended = (self._clock + int(1e9 * instant) for instant in (one.began, one.ended))
                self._tracer.start_span(one.stage, context=inside, start_time=began).end(ended)
            span.set_attributes(
                {
                    "http.response.status_code": status,
                    **{f"dsimg.{stage}_ms": 1000 * seconds for stage, seconds in stages.seconds.items()},
                    **({"dsimg.batch_images": stages.batch} if stages.batch else {}),
                    **({"dsimg.refused": refused.kind} if refused else {}),
                }
            )
            if status >= 500:  # 4xx are the client's, and no errors of a server's span
                span.set_attribute("error.type", refused.kind if refused else str(status))
                span.set_status(StatusCode.ERROR, str(refused) if refused else None)
        span.end(self._clock + time.monotonic_ns())


def open_tracing(say: Callable[[str], None]) -> Tracing:
    """Return what sends traces by OTLP over HTTP, from a thread of its own. Raises ConfigError.

    say: told what OpenTelemetry has to say, but not each time that its collector cannot be reached.
    """
    logger = logging.getLogger("opentelemetry")
    logger.handlers, logger.propagate = [_Seldom(say)], False
    protocol = _environment("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if protocol != "http/protobuf":
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}; --otel sends http/protobuf. Unset it, and give the port "
            "that the collector has for HTTP, usually 4318, in OTEL_EXPORTER_OTLP_ENDPOINT."
        )
    exporter = _environment("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {exporter}; --otel sends otlp. Unset it, or leave out --otel.")
    whole = _environment("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    base = _environment("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
    endpoint = whole or f"{base.removesuffix('/')}/v1/traces"
    if not re.match(r"https?://[^/]", endpoint):
        raise ConfigError(
            f"OTEL_EXPORTER_OTLP_{'TRACES_' if whole else ''}ENDPOINT is {whole or base}; give a URL, as "
            f"http://collector:4318{'/v1/traces' if whole else ''}."
        )
    resource = Resource.create(
        {"service.name": "dsimg", "service.version": dsimg.__version__, **OTELResourceDetector().detect().attributes}
    )
    try:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    except ValueError as error:
        raise ConfigError(f"OpenTelemetry does not take its environment variables, OTEL_...: {error}") from error
    return Tracing(provider, goes_to=re.sub(r"//[^/]*@", "//", endpoint))


class _Seldom(logging.Handler):
    """Says one of OpenTelemetry's warnings, then none for a while: each batch would bring some."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say, self._next, self._unsaid = say, 0.0, 0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now < self._next:
            self._unsaid += 1
            return
        unsaid, self._unsaid, self._next = self._unsaid, 0, now + QUIET_SECONDS
        more = f" ({unsaid} more warnings since the last one)" if unsaid else ""
        self._say(f"OpenTelemetry: {record.getMessage()}{more}")


def _environment(*names: str) -> str:
    """Return the first of these variables that says something."""
    return next(filter(None, (os.environ.get(name, "").strip() for name in names)), "")


def _said_by_client(request: Request) -> dict[str, str | int]:
    """Return the attributes of HTTP that a request's head has."""
    scope, headers = request.scope, request.headers
    found: dict[str, str | int] = {
        "url.scheme": scope["scheme"],
        "url.path": scope["raw_path"].decode("latin-1")[:LONGEST],
        "network.protocol.version": scope["http_version"],
    }
    if scope["query_string"]:
        found["url.query"] = scope["query_string"].decode("latin-1")[:LONGEST]
    if "user-agent" in headers:
        found["user_agent.original"] = headers["user-agent"][:LONGEST]
    if request.client is not None:
        found["client.address"] = request.client.host
    with contextlib.suppress(ValueError):  # any text may be a Host
        host = urlsplit(f"//{headers.get('host', '')[:LONGEST]}")
        port = host.port
        if host.hostname:
            found |= {"server.address": host.hostname} | ({} if port is None else {"server.port": port})
    return found


def _model(server: Server, route: str, request: Request) -> dict[str, str]:
    """Return the attributes that say which model is asked: the one that the route will ask for in a moment."""
    asked = request.path_params
    if route != "/predict" and "name" not in asked:
        return {}
    try:
        model = server.model(asked.get("name"), asked.get("version"))
    except HttpError:
        return {}
    return {"dsimg.model.name": model.name, "dsimg.model.version": model.version}
