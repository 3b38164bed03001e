"""What users and strangers really send: the zoo of awkward files, and requests that were damaged on purpose."""

import json
import random
import socket
import threading

import numpy as np
import pytest

from dsimg.errors import ImageError
from dsimg.preprocess import decode, resize_and_crop
from tests.dsimg.zoo import make_zoo
from tests.export.golden_runs import encoded_pictures, write_golden_run
from tests.export.server.live import serving
from tests.export.server.test_predict import form


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    run = write_golden_run(tmp_path_factory.mktemp("served") / "digits")
    with serving(run.path, body_seconds=0.2, head_seconds=0.2, max_queue=2000, deadline_ms=60_000) as found:
        yield found


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo") / "zoo"
    return folder, make_zoo(folder)


def logits_over_http(live, data):
    """Return the logits of an encoded image by the protocol's raw request: its bytes, nothing else."""
    answer = live.post("/v2/models/digits/infer", data, inference_header_content_length="0")
    if answer.status != 200:
        return answer
    at = int(answer.headers["inference-header-content-length"])
    return np.frombuffer(answer.body[at:], "<f4")


def test_every_file_of_the_zoo_over_http(live, zoo):
    folder, expect = zoo
    model = live.server.models["digits"]
    wrong, answered = [], 0
    for case in expect["files"]:
        data = (folder / case["path"]).read_bytes()
        answer = live.post("/predict", data)
        if answer.status not in case["http"]["status"]:
            wrong.append((case["id"], answer.status))
            continue
        try:
            image = decode(data)
        except ImageError as error:
            if answer.status != 400 or (data and answer.json["error"] != str(error)):
                wrong.append((case["id"], answer.json["error"]))
            continue
        here = model.served.logits(resize_and_crop(image, model.served.preprocess)[None])[0]
        answered += 1
        best = answer.json["images"][0]["classes"][0]["index"]
        if best != here.argmax() or not np.array_equal(logits_over_http(live, data), here):
            wrong.append((case["id"], "other logits than evaluation's"))
    assert wrong == []
    assert answered > 20


def test_the_zoo_s_requests(live, zoo):
    folder, expect = zoo
    plain = (folder / "files/plain.jpg").read_bytes()
    bad = (folder / "files/html_404.jpg").read_bytes()
    several, kind = form(("a", plain), ("b", bad), ("c", plain))
    field = several.replace(b'name="f"', b'name="photo"')
    found = {
        "no_body": live.post("/predict", b"").status,
        "wrong_type": live.post("/predict", plain, content_type="text/plain").status,
        "no_type": live.post("/predict", plain).status,
        "multipart_wrong_field": live.post("/predict", field, content_type=kind).status,
        "good_between_bad": live.post("/predict", several, content_type=kind).status,
    }
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as large:  # refused before the body is sent
        large.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 62914560\r\n\r\n" + plain)
        found["large_body"] = int(large.recv(4000).split()[1])
    statuses, answers = set(), set()

    def twice():
        answer = live.post("/predict", plain)
        statuses.add(answer.status)
        answers.add(json.dumps(answer.json["images"]))

    for _ in range(50):
        threads = [threading.Thread(target=twice) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    found["same_twice"] = statuses.pop()
    assert len(answers) == 1
    assert {name: status for name, status in found.items() if status not in allowed(expect, name)} == {}
    assert found.keys() == {request["id"] for request in expect["requests"]}


def allowed(expect, name):
    return next(request["status"] for request in expect["requests"] if request["id"] == name)


def test_broken_forms_say_nothing_in_the_log(live, caplog):
    forms = (b"--x\r\nA\x01: b\r\n\r\nd\r\n--x--", b"--x--" + b"junk" * 100, b"x" * 100)
    kind = "multipart/form-data; boundary=x"
    assert {live.post("/predict", form, content_type=kind).status for form in forms} == {400}
    assert caplog.records == []


def mutated(data, random_):
    """Return bytes with some changed, cut out, doubled, or the end missing."""
    data = bytearray(data)
    for _ in range(random_.randint(1, 6)):
        at = random_.randrange(max(len(data), 1))
        how = random_.randrange(5)
        if how == 0 and data:
            data[at] = random_.randrange(256)
        elif how == 1:
            del data[at : at + random_.randint(1, 40)]
        elif how == 2:
            data[at:at] = data[at : at + random_.randint(1, 40)]
        elif how == 3:
            data[at : at + 4] = random_.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"))
        else:
            del data[random_.randrange(len(data) + 1) :]
    return bytes(data)


def requests(random_):
    """Return (head, body) of a valid request of some kind; the head without its Content-Length."""
    data = random_.choice(encoded_pictures())
    kind = random_.randrange(4)
    head, body = b"POST /predict HTTP/1.1\r\nHost: x\r\n", data
    if kind == 1:
        body, content_type = form(("a", data), ("b", data))
        head += b"Content-Type: " + content_type.encode() + b"\r\n"
    elif kind == 2:
        body = json.dumps({"images": ["aGVsbG8="]}).encode()
        head += b"Content-Type: application/json\r\n"
    elif kind == 3:
        tensor = np.zeros((1, 3, 16, 16), np.float32).tobytes()
        said = {"name": "images", "datatype": "FP32", "shape": [1, 3, 16, 16]}
        text = json.dumps({"inputs": [{**said, "parameters": {"binary_data_size": len(tensor)}}]}).encode()
        head = b"POST /v2/models/digits/infer HTTP/1.1\r\nHost: x\r\n"
        head += b"Inference-Header-Content-Length: %d\r\n" % len(text)
        body = text + tensor
    return head, body


def damage(live, count, seed):
    """Send damaged requests, and return the statuses; 0 where the server closed the connection without one."""
    random_, statuses = random.Random(seed), []
    for _ in range(count):
        head, body = requests(random_)
        where = random_.randrange(4)
        if where != 0:
            body = mutated(body, random_)
        length = len(body)
        if where == 1:
            head = mutated(head, random_)
        if where == 2:
            length += random_.choice((-1, 1, 1000, -length, 2**31))
        try:
            with socket.create_connection(("127.0.0.1", live.port), timeout=10) as connection:
                connection.sendall(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % length + body)
                if where == 3:  # the client goes in the middle
                    continue
                answer = connection.recv(200)
        except OSError:
            statuses.append(0)
            continue
        statuses.append(int(answer.split()[1]) if answer else 0)
    return statuses


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_requests_are_the_client_s_fault(live, count):
    statuses = damage(live, count, seed=0)
    assert 500 not in statuses
    assert {200, 400} <= set(statuses)
    assert live.post("/predict", encoded_pictures()[0]).status == 200
    assert not live.server.models["digits"].batcher.busy
