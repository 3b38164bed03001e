"""What a client may make a connection hold, and how long: heads, bodies after their answer, answers left unread."""

import http.client
import json
import socket
import ssl
import subprocess
import time

import pytest

from dsimg_export.server import connection as bounds
from tests.export.golden_runs import encoded_pictures, write_golden_run
from tests.export.server.live import serving

HEAD = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_golden_run(tmp_path_factory.mktemp("served") / "digits").path


@pytest.fixture(scope="module")
def live(run):
    with serving(run) as found:
        found.log = []
        found.server.access_log = found.log.append
        yield found


def connect(live):
    return socket.create_connection(("127.0.0.1", live.port), timeout=10)


def made_certificate(folder):
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    words = "-x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", "req", *words.split(), "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def answer_of(connection):
    """Return one whole answer: its head and its body may come apart."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += connection.recv(2**16)
    head, _, body = said.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(2**16)
    return head + b"\r\n\r\n" + body


def everything(connection):
    """Return what a server says until it closes."""
    parts = []
    try:
        while part := connection.recv(2**16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def seconds_until_closed(connection):
    start = time.monotonic()
    everything(connection)
    return time.monotonic() - start


def send_for_ever(connection, data, seconds=10):
    """Send until the server closes; return the bytes that it took."""
    sent, deadline = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            sent += connection.send(data)
    except OSError:
        return sent
    raise AssertionError("it is still taken")


@pytest.mark.parametrize(
    ("begin", "rest"),
    [
        (HEAD, b"A: bbbbbbbbbbbbbbbb\r\n" * 1000),
        (HEAD + b"A: ", b"b" * 20_000),
        (b"GET /", b"a" * 20_000),
        (HEAD + b"A: 1\r\n\r\n", b"\r\n" * 10_000),  # no request at all
    ],
)
def test_a_head_without_end_is_refused(live, begin, rest):
    with connect(live) as client:
        client.sendall(begin)
        assert send_for_ever(client, rest) < 20 * 2**20  # most of it in the kernel's buffers


@pytest.mark.parametrize("head", [HEAD + b"A: bcd\r\n" * 9000, b"GET /" + b"a" * 66_000 + b" HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_is_too_large_is_answered_in_json(live, head):
    with connect(live) as client:
        client.sendall(head + b"\r\n")
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 431 ")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nx-request-id: " in head
    assert b"\r\nx-content-type-options: nosniff" in head
    assert json.loads(body) == {"error": "the head is larger than 65536 bytes"}


def test_the_trailers_of_a_body_are_bounded(live):
    with connect(live) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nA: ")
        send_for_ever(client, b"b" * 20_000)


def test_a_head_of_60_kb_is_taken(live):
    assert live.get("/v2/health/live", x_long="b" * 60_000).status == 200


def test_what_is_not_http_is_refused_in_json(live):
    with connect(live) as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200))
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\ncontent-type: application/json" in head
    assert b"\r\nconnection: close" in head
    assert json.loads(body) == {"error": "this is not HTTP, or is damaged"}
    assert json.loads(live.log[-1])["status"] == 400


def test_connections_are_counted(run):
    with serving(run, max_connections=2) as live:
        with connect(live) as first, connect(live) as second:
            for client in (first, second):
                client.sendall(HEAD + b"\r\n")
                assert answer_of(client).startswith(b"HTTP/1.1 200")
            with connect(live) as third:
                answer = everything(third)
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"too many connections" in answer
        deadline = time.monotonic() + 5
        while live.connections:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert live.get("/v2/health/live").status == 200


def test_so_many_requests_may_wait_on_a_connection(live):
    last = HEAD + b"Connection: close\r\n\r\n"
    with connect(live) as client:
        client.sendall((HEAD + b"\r\n") * bounds.PIPELINED + last)
        assert everything(client).count(b"HTTP/1.1 200") == bounds.PIPELINED + 1
    with connect(live) as client:
        client.sendall((HEAD + b"\r\n") * 5000 + last)
        assert everything(client).count(b"HTTP/1.1 200") <= bounds.PIPELINED


def test_an_empty_line_does_not_keep_a_connection(run):
    with serving(run, head_seconds=0.5) as live, connect(live) as client:
        client.sendall(HEAD + b"\r\n")
        assert answer_of(client).startswith(b"HTTP/1.1 200")
        client.sendall(b"\r\n")
        assert seconds_until_closed(client) < 3


def test_a_body_without_end_after_its_answer_is_cut_off(live, monkeypatch):
    monkeypatch.setattr(bounds, "REST_SECONDS", 0.3)
    with connect(live) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert answer_of(client).startswith(b"HTTP/1.1 404")
        start = time.monotonic()
        send_for_ever(client, b"x" * 1000)
        assert time.monotonic() - start < 3


def test_a_body_that_comes_just_after_its_answer_keeps_the_connection(live, monkeypatch):
    monkeypatch.setattr(bounds, "REST_SECONDS", 0.3)
    with connect(live) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n")
        assert answer_of(client).startswith(b"HTTP/1.1 404")
        client.sendall(b"abc")
        time.sleep(1.0)
        client.sendall(HEAD + b"\r\n")
        assert answer_of(client).startswith(b"HTTP/1.1 200")


def test_a_client_that_reads_nothing_is_given_up(live, monkeypatch):
    monkeypatch.setattr(bounds, "WRITE_SECONDS", 0.3)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", live.port))
        client.settimeout(5)
        for _ in range(2000):
            try:
                client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            except OSError:
                break
            time.sleep(0.002)
        deadline = time.monotonic() + 5
        while live.connections:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_https(run, tmp_path):
    certificate, key = made_certificate(tmp_path)
    with serving(run, ssl_certfile=certificate, ssl_keyfile=key) as live:
        trusted = ssl.create_default_context(cafile=str(certificate))
        client = http.client.HTTPSConnection("127.0.0.1", live.port, context=trusted, timeout=10)
        for path in ("/openapi.json", "/openapi.json"):
            client.request("GET", path)
            assert json.loads(client.getresponse().read())["openapi"]
        client.request("POST", "/predict", encoded_pictures()[0])
        assert client.getresponse().read()
        client.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("POST", "/predict/", 404), ("DELETE", "/predict", 405), ("GET", "/v2/models/", 404)],
)
def test_what_no_route_takes_is_answered_logged_and_counted_like_the_rest(live, method, path, status):
    answer = live.ask(method, path, x_request_id=f"id-{method}", host="elsewhere.example")
    assert answer.status == status
    assert answer.headers["x-request-id"] == f"id-{method}"
    assert answer.headers["x-frame-options"] == "DENY"
    assert "date" in answer.headers
    assert "location" not in answer.headers
    assert (answer.headers.get("allow") == "POST") == (status == 405)
    line = json.loads(live.log[-1])
    assert (line["status"], line["path"], line["id"]) == (status, path, f"id-{method}")
    assert f'dsimg_requests_total{{route="none",status="{status}"}}' in live.get("/metrics").body.decode()


def test_a_client_cannot_name_itself_in_the_log(live):
    live.get("/v2/health/live", x_forwarded_for="9.9.9.9", x_forwarded_proto="https")
    assert json.loads(live.log[-1])["client"] == "127.0.0.1"


def test_a_client_that_does_not_end_its_tls_is_cut_off(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bounds, "CLOSE_SECONDS", 0.3)
    certificate, key = made_certificate(tmp_path)
    with serving(run, ssl_certfile=certificate, ssl_keyfile=key) as live:
        context = ssl.create_default_context(cafile=str(certificate))
        with context.wrap_socket(connect(live), server_hostname="localhost") as client:
            client.sendall(HEAD + b"Connection: close\r\n\r\n")
            assert answer_of(client).startswith(b"HTTP/1.1 200")
            deadline = time.monotonic() + 5
            while live.connections:  # it takes no leave
                assert time.monotonic() < deadline
                time.sleep(0.02)
