"""OpenTelemetry traces: what a request's spans say, that they arrive, and that nothing waits where they do not."""

import contextlib
import gzip
import http.server
import json
import re
import signal
import socket
import sys
import threading
import time

import numpy as np
import pytest

from dsimg.errors import ConfigError
from dsimg_export import serve
from tests.export.golden_runs import encoded_pictures
from tests.export.server.live import serving
from tests.export.server.test_life import Process

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="pip install 'dsimg[otel]' to run this")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from dsimg_export.server.tracing import Tracing, open_tracing

PICTURE = encoded_pictures()[0]
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """A server whose spans stay here."""

    def __init__(self, live):
        self.live = live
        self.lines = []
        self._spans = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        live.server.tracing = Tracing(provider)
        live.server.access_log = lambda line: self.lines.append(json.loads(line))

    def ask(self, *words, **headers):
        """Return the answer, the request's span and those inside it."""
        self._spans.clear()
        answer = self.live.ask(*words, **headers)
        *inside, outer = self._spans.get_finished_spans()
        return answer, outer, inside


@pytest.fixture
def traced(live):
    yield Traced(live)
    live.server.tracing = live.server.access_log = None


def test_a_request_is_a_span_by_the_conventions(traced):
    (model,) = traced.live.server.models.values()
    answer, span, _ = traced.ask(
        "POST", f"/models/{model.name}/predict?top=2", PICTURE, x_request_id="mine", user_agent="me/1"
    )
    assert answer.status == 200
    assert span.name == "POST /models/{name}/predict"
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    timings = {name: span.attributes[name] for name in span.attributes if name.endswith("_ms")}
    assert {name: value for name, value in span.attributes.items() if name not in timings} == {
        "http.request.method": "POST",
        "http.route": "/models/{name}/predict",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": f"/models/{model.name}/predict",
        "url.query": "top=2",
        "network.protocol.version": "1.1",
        "user_agent.original": "me/1",
        "client.address": "127.0.0.1",
        "server.address": "127.0.0.1",
        "server.port": traced.live.port,
        "dsimg.request_id": "mine",
        "dsimg.model.name": model.name,
        "dsimg.model.version": model.version,
        "dsimg.batch_images": 1,
    }
    assert set(timings) == {"dsimg.read_ms", "dsimg.decode_ms", "dsimg.queue_ms", "dsimg.infer_ms"}


def test_the_stages_lie_in_the_request_one_after_the_other(traced):
    _, span, inside = traced.ask("POST", "/predict", PICTURE)
    assert [one.name for one in inside] == ["read", "queue", "decode", "queue", "infer"]
    took = dict.fromkeys(("read", "queue", "decode", "infer"), 0.0)
    for one in inside:
        assert one.parent.span_id == span.context.span_id
        assert one.context.trace_id == span.context.trace_id
        took[one.name] += (one.end_time - one.start_time) / 1e6
    assert took == {stage: pytest.approx(span.attributes[f"dsimg.{stage}_ms"], abs=1e-3) for stage in took}
    instants = [instant for one in inside for instant in (one.start_time, one.end_time)]
    assert [span.start_time, *instants, span.end_time] == sorted([span.start_time, *instants, span.end_time])
    assert abs(span.end_time / 1e9 - time.time()) < 5


def test_tensors_have_no_decoding_and_their_version_is_known(traced):
    (model,) = traced.live.server.models.values()
    shape = [1, *model.input_shape]
    body = {
        "inputs": [{"name": "images", "datatype": "FP32", "shape": shape, "data": np.zeros(shape).ravel().tolist()}]
    }
    path = f"/v2/models/{model.name}/versions/{model.version}/infer"
    answer, span, inside = traced.ask("POST", path, json.dumps(body).encode())
    assert answer.status == 200
    assert [one.name for one in inside] == ["read", "queue", "infer"]
    assert span.attributes["http.route"] == "/v2/models/{name}/versions/{version}/infer"
    assert span.attributes["dsimg.model.version"] == model.version


def test_a_caller_s_trace_goes_on_and_the_log_names_it(traced):
    _, span, inside = traced.ask("POST", "/predict", PICTURE, traceparent=CALLER, tracestate="a=b")
    _, caller_trace, caller_span, _ = CALLER.split("-")
    assert f"{span.context.trace_id:032x}" == caller_trace
    assert f"{span.parent.span_id:016x}" == caller_span
    assert span.parent.is_remote
    assert span.context.trace_state.to_header() == "a=b"
    assert {one.context.trace_id for one in inside} == {span.context.trace_id}
    (line,) = traced.lines
    assert (line["trace_id"], line["span_id"]) == (caller_trace, f"{span.context.span_id:016x}")


@pytest.mark.parametrize("given", ["", "nonsense", CALLER[:-3], CALLER.replace("00-", "ff-", 1), "0" * 600])
def test_what_is_no_trace_of_a_caller_begins_a_new_one(traced, given):
    _, span, _ = traced.ask("GET", "/models", traceparent=given)
    assert span.parent is None


def test_a_caller_that_keeps_no_trace_gets_none_and_the_log_still_names_it(traced):
    traced.live.ask("POST", "/predict", PICTURE, traceparent=CALLER.removesuffix("01") + "00")
    assert traced._spans.get_finished_spans() == ()
    assert traced.lines[0]["trace_id"] == CALLER.split("-")[1]


@pytest.mark.parametrize(
    ("words", "headers", "status", "refused", "error"),
    [
        (("POST", "/predict", PICTURE), {"x_request_timeout": "0.0000001"}, 503, "deadline", "deadline"),
        (("POST", "/predict", b"no image"), {}, 400, None, None),
        (("POST", "/models/nope/predict", PICTURE), {}, 404, "unknown", None),
        (("POST", "/v2/models/digits/versions/7/infer", b""), {}, 404, "unknown", None),
        (("POST", "/v2/models/digits/infer", b"{}"), {}, 400, "request", None),
        (("GET", "/no/such%00path/%C3%A4?a=%FF"), {}, 404, "unknown", None),
        (("PROPFIND", "/predict"), {}, 405, "unknown", None),
        (("GET", "/models"), {"host": "[::1"}, 200, None, None),
    ],
)
def test_what_was_refused_says_why(traced, words, headers, status, refused, error):
    answer, span, _ = traced.ask(*words, **headers)
    assert answer.status == status
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes.get("dsimg.refused") == refused
    assert span.attributes.get("error.type") == error
    assert span.status.status_code is (StatusCode.ERROR if error else StatusCode.UNSET)
    if refused == "unknown":
        assert "dsimg.model.name" not in span.attributes


def test_a_request_without_a_route_is_named_by_its_method_alone(traced):
    _, span, _ = traced.ask("GET", "/no/such%00path/%C3%A4?a=%FF")
    assert (span.name, span.attributes["url.path"]) == ("GET", "/no/such%00path/%C3%A4")
    assert "http.route" not in span.attributes
    _, span, _ = traced.ask("PROPFIND", "/predict")
    assert (span.name, span.attributes["http.request.method"]) == ("HTTP", "_OTHER")
    assert span.attributes["http.request.method_original"] == "PROPFIND"


def test_a_bug_is_an_error_of_the_span(traced, monkeypatch):
    monkeypatch.setattr(traced.live.server, "say", lambda text: None)
    monkeypatch.setattr(next(iter(traced.live.server.models.values())).batcher, "submit", None)
    answer, span, inside = traced.ask("POST", "/predict", PICTURE)
    assert answer.status == 500
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "bug")
    assert [one.name for one in inside] == ["read"]


def test_a_client_s_words_are_cut(traced):
    _, span, _ = traced.ask("GET", f"/models?{'a' * 5000}", user_agent="b" * 5000)
    assert len(span.attributes["url.query"]) == len(span.attributes["user_agent.original"]) == 1024


@pytest.mark.parametrize("path", ["/metrics", "/v2/health/live", "/v2/health/ready"])
def test_probes_are_not_traced(traced, path):
    assert traced.live.get(path).status == 200
    assert traced._spans.get_finished_spans() == ()
    assert "trace_id" not in traced.lines[0]


def test_a_sampler_that_takes_none_makes_no_spans_and_answers(live):
    live.server.tracing = Tracing(TracerProvider(ALWAYS_OFF, shutdown_on_exit=False))
    try:
        assert live.post("/predict", PICTURE).status == 200
    finally:
        live.server.tracing = None


# Over HTTP, from a process


@pytest.fixture
def collector():
    """A collector of traces: its URL, and what it was sent, each with its path."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body
            received.append((self.path, self.headers, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join(10)


def test_traces_arrive_as_the_environment_says_the_last_at_the_end(run, collector, monkeypatch):
    url, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "labels")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")  # longer than this lasts
    with Process("--source", run.path, "--otel", "--access_log") as server:
        assert f"{url}/v1/traces" in "\n".join(server.lines)
        for _ in range(3):
            assert server.ask("POST", "/predict", PICTURE)[0] == 200
        assert received == []
        code, rest = server.end()
    assert code == 0
    ((path, headers, sent),) = received
    assert (path, headers["x-key"], headers["content-type"]) == ("/v1/traces", "secret", "application/x-protobuf")
    (group,) = sent.resource_spans
    about = {one.key: one.value.string_value for one in group.resource.attributes}
    assert (about["service.name"], about["deployment.environment.name"]) == ("labels", "test")
    assert re.fullmatch(r"\d+\.\d+.*", about["service.version"])
    (scope,) = group.scope_spans
    assert scope.scope.name == "dsimg.serve"
    names = [span.name for span in scope.spans]
    assert {name: names.count(name) for name in names} == {
        **dict.fromkeys(("POST /predict", "read", "decode", "infer"), 3),
        "queue": 6,
    }
    logged = {json.loads(line)["trace_id"] for line in rest.splitlines() if line.startswith("{")}
    assert logged == {span.trace_id.hex() for span in scope.spans}


def test_a_service_without_a_name_has_ours(run, collector, monkeypatch):
    url, received = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{url}/elsewhere")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    opened = open_tracing(print)
    with serving(run.path) as live:
        live.server.tracing = opened
        assert live.post("/predict", PICTURE).status == 200
    deadline = time.monotonic() + 10
    while not received:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert opened.close(5)
    assert received[0][0] == "/elsewhere"
    about = {one.key: one.value.string_value for one in received[0][2].resource_spans[0].resource.attributes}
    assert about["service.name"] == "dsimg"


@pytest.mark.parametrize("hangs", [False, True])
def test_a_collector_out_of_reach_delays_no_answer_and_is_said_once(run, monkeypatch, hangs):
    with contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        if hangs:
            listener.listen()  # connections are made, and nothing ever comes
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.4")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
        with Process("--source", run.path, "--otel", "--grace_seconds", "2") as server:
            for _ in range(60):
                assert server.ask("POST", "/predict", PICTURE)[0] == 200
            start = time.monotonic()
            code, rest = server.end()
    assert time.monotonic() - start < 4
    assert code == 0
    assert "every request that was accepted has been answered." in rest
    assert "Traceback" not in rest
    assert sum("OpenTelemetry" in line for line in rest.splitlines()) == 1


def test_the_last_traces_are_not_waited_for_beyond_the_grace(run, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:  # answers nothing
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with Process("--source", run.path, "--otel", "--grace_seconds", "1") as server:
            assert server.ask("POST", "/predict", PICTURE)[0] == 200
            start = time.monotonic()
            code, rest = server.end(signal.SIGTERM)
    assert time.monotonic() - start < 4
    assert code == 0
    assert "the last traces could not be sent in time." in rest


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "usually 4318"),
        ("OTEL_TRACES_EXPORTER", "console", "--otel sends otlp"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "give a URL, as http://collector:4318."),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "/v1", "as http://collector:4318/v1/traces."),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1", "max_queue_size must be a positive integer"),
    ],
)
def test_variables_that_cannot_be_kept_are_said(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=re.escape(said)):
        open_tracing(print)


def test_a_password_in_the_address_is_not_shown(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://me:secret@collector:4318/")
    opened = open_tracing(print)
    assert opened.goes_to == "https://collector:4318/v1/traces"
    assert opened.close(5)


def test_without_the_packages_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "dsimg_export.server.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [name for name in sys.modules if name.startswith("opentelemetry.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=re.escape("--otel needs OpenTelemetry: pip install 'dsimg[otel]'.")):
        serve._tracing()
