"""What strangers can make the server spend: memory, connections, the event loop's time."""

import gzip
import json
import socket
import threading
import time

import numpy as np
import pytest

from dsimg.errors import ConfigError
from dsimg_export.serve import ServeConfig
from tests.export.golden_runs import encoded_pictures, write_golden_run
from tests.export.server.live import serving

INFER = "/v2/models/digits/infer"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_golden_run(tmp_path_factory.mktemp("served") / "digits").path


@pytest.fixture(scope="module")
def live(run):
    with serving(run, deadline_ms=20_000) as found:
        yield found


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def slowest_answer_during(live, work):
    """Return the result of `work`, and the seconds of the slowest answer to others meanwhile."""
    results, slowest = [], 0.0
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    while thread.is_alive():
        start = time.monotonic()
        assert live.get("/v2/health/live").status == 200
        slowest = max(slowest, time.monotonic() - start)
    return results[0], slowest


def tensor(data):
    given = {"name": "images", "datatype": "FP32", "shape": [1, 3, 16, 16]}
    return json.dumps({"inputs": [{**given, "data": data}]}).encode()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b'{"inputs":[' + b"[]," * 11_000_000 + b"[]]}", "lists and objects"),
        (b'{"inputs":[' + b"{}," * 11_000_000 + b"{}]}", "lists and objects"),
        (b'{"inputs":[' + b"1.5," * 8_000_000 + b"1]}", "values"),
        (b'{"inputs":{' + b'"a" : 1' * 4_000_000 + b"}}", "strings"),
    ],
)
def test_a_small_body_that_unpacks_to_very_much_json_is_refused_before_it_is_parsed(live, text, what):
    body = gzip.compress(text, 6)
    assert len(body) < 200_000
    answer, slowest = slowest_answer_during(live, lambda: live.post(INFER, body, content_encoding="gzip"))
    assert answer.status == 400
    assert what in answer.json["error"]
    assert slowest < 0.5


def test_json_that_is_as_large_as_it_may_be_does_not_hold_others_up(tmp_path):
    run = write_golden_run(tmp_path / "digits")
    with serving(run.path, max_images=5000, deadline_ms=60_000, max_queue=10_000) as live:
        data = np.linspace(0, 1, 2000 * 768).tolist()
        body = tensor(data).replace(b"[1, 3, 16, 16]", b"[2000, 3, 16, 16]")
        assert len(body) > 2**24
        answer, slowest = slowest_answer_during(live, lambda: live.post(INFER, body))
        assert answer.status == 200
        assert answer.json["outputs"][0]["shape"] == [2000, 5]
        assert slowest < 1.0


def test_a_full_batch_nested_in_json_is_taken(live):
    data = np.linspace(0, 1, 64 * 768).reshape(64, 3, 16, 16).tolist()
    body = json.dumps(
        {"inputs": [{"name": "images", "datatype": "FP32", "shape": [64, 3, 16, 16], "data": data}]}, indent=1
    ).encode()
    assert live.post(INFER, body).status == 200
    assert live.post(INFER, gzip.compress(body), content_encoding="gzip").status == 200


def test_the_deadline_is_counted_from_when_the_body_is_there(run):
    data = encoded_pictures()[0]
    with serving(run, deadline_ms=300) as live:
        for path, header in (("/predict", ""), (INFER, "Inference-Header-Content-Length: 0\r\n")):
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{header}Content-Length: {len(data)}\r\n\r\n"
            with socket.create_connection(("127.0.0.1", live.port), timeout=10) as slow:
                slow.sendall(head.encode() + data[:20])
                time.sleep(0.6)
                slow.sendall(data[20:])
                assert slow.recv(1000).startswith(b"HTTP/1.1 200")


def test_bodies_of_all_requests_share_a_bounded_room(run):
    body = b"x" * 200_000
    with serving(run, max_body_mib=0.25, max_bodies_mib=0.5) as live:
        slow = []
        for _ in range(2):
            connection = socket.create_connection(("127.0.0.1", live.port), timeout=10)
            connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n" + body[:-1])
            slow.append(connection)
        until(lambda: live.server.room.used == 2 * 199_999)
        answer = live.post("/predict", body)
        assert answer.status == 503
        assert answer.json == {"error": "no room for the body now"}
        assert answer.headers["retry-after"] == "1"
        packed = gzip.compress(bytes(200_000))
        answer = live.post(INFER, packed, content_encoding="gzip", inference_header_content_length="0")
        assert answer.status == 503  # what it unpacks to counts
        slow[0].close()
        until(lambda: live.server.room.used == 199_999)
        assert live.post("/predict", encoded_pictures()[0]).status == 200
        slow[1].sendall(b"x")
        assert slow[1].recv(1000).startswith(b"HTTP/1.1 400")
        slow[1].close()
        until(lambda: live.server.room.used == 0)


def test_a_room_smaller_than_a_body_is_an_error():
    with pytest.raises(ConfigError, match="at least --max_body_mib, 32"):
        ServeConfig(source=("run",), max_bodies_mib=16)
