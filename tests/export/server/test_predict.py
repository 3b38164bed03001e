"""POST /predict: images in, labels out."""

import base64
import gzip
import io
import json
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import ExifTags, Image

from dsimg import metrics
from dsimg.preprocess import Preprocess, preprocess_image
from dsimg_export.served import open_served
from dsimg_export.server.model import _network
from dsimg_export.session import INPUT
from tests.export.golden_runs import encoded_pictures, picture, write_golden_run
from tests.export.server.live import serving


def expected(run, data):
    """Return the classes and probabilities that evaluation's own steps give."""
    served = open_served(run)
    image = preprocess_image(data, Preprocess.from_dict(run.model["preprocess"]))
    logits = served.session.run(None, {"images": image[None]})[0].astype(np.float64)
    shares = np.exp(logits[0] - logits.max())
    shares /= shares.sum()
    return [(served.classes[k], float(shares[k])) for k in metrics.top_k(logits, 5)[0]]


def said(image):
    return [(one["class"], one["probability"]) for one in image["classes"]]


def form(*parts, boundary="xx"):
    body = b"".join(
        f'--{boundary}\r\nContent-Disposition: form-data; name="f"; filename="{name}"\r\n\r\n'.encode() + data + b"\r\n"
        for name, data in parts
    )
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", "", "application/x-www-form-urlencoded"])
def test_the_bytes_of_an_image_are_answered_whatever_their_type_is_called(live, run, number, kind):
    data = encoded_pictures()[number]
    answer = live.post("/predict", data, content_type=kind)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    (image,) = answer.json["images"]
    assert said(image) == expected(run, data)
    assert image["index"] == 0


def test_a_form_of_several_files_is_answered_in_order_with_their_names(live, run):
    pictures = encoded_pictures()
    body, kind = form(*((f"{i}ü.png", data) for i, data in enumerate(pictures)))
    images = live.post("/predict", body, content_type=kind).json["images"]
    assert [image["name"] for image in images] == ["0ü.png", "1ü.png", "2ü.png"]
    assert [said(image)[0][0] for image in images] == [expected(run, data)[0][0] for data in pictures]


def test_base64_in_json_is_answered(live, run):
    data = encoded_pictures()[0]
    text = base64.b64encode(data).decode()
    body = {"images": [text, {"name": "b", "data": text}, f"data:image/png;base64,{text}"]}
    images = live.post("/predict", json.dumps(body).encode(), content_type="application/json").json["images"]
    assert [said(image) for image in images] == [expected(run, data)] * 3
    assert images[1]["name"] == "b"


def test_an_image_that_cannot_be_read_fails_alone(live, run):
    good = encoded_pictures()[0]
    body, kind = form(("a", good), ("b", b"no image"), ("c", good[:60]), ("d", b""), ("e", good))
    answer = live.post("/predict", body, content_type=kind)
    assert answer.status == 200
    images = answer.json["images"]
    assert ["error" in image for image in images] == [False, True, True, True, False]
    assert [image["index"] for image in images] == list(range(5))
    assert "not an image" in images[1]["error"]
    assert "truncated" in images[2]["error"]
    assert said(images[4]) == expected(run, good)


@pytest.mark.parametrize("data", [b"no image", b"<html>", encoded_pictures()[0][:60]])
def test_where_no_image_can_be_read_the_request_fails(live, data):
    answer = live.post("/predict", data)
    assert answer.status == 400
    assert answer.json["error"] == answer.json["images"][0]["error"]


def test_base64_that_is_none_fails_alone(live):
    good = base64.b64encode(encoded_pictures()[0]).decode()
    body = json.dumps({"images": [good, "???", 7, {"data": None}]}).encode()
    images = live.post("/predict", body, content_type="application/json").json["images"]
    assert ["error" in image for image in images] == [False, True, True, True]
    assert "base64" in images[1]["error"]


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (b"", "image/png", "no image"),
        (b"{", "application/json", "cannot read the body as JSON"),
        (b"[" * 60_000, "application/json", "cannot read the body as JSON"),
        (b"[" * 100_000, "application/json", "it holds 100000 lists and objects, and the images"),
        (b"\xff\xfe", "application/json", "cannot read the body as JSON"),
        (b"[]", "application/json", "no list of images"),
        (b'{"images": 3}', "application/json", "no list of images"),
        (b'{"images": []}', "application/json", "no image"),
        (b"xx", "multipart/form-data", "without a boundary"),
        (b"xx", "multipart/form-data; boundary=xx", "no whole"),
        (form(("a", b"b"))[0][:-6], "multipart/form-data; boundary=xx", "cut off"),
        (b"--xx--\r\n", "multipart/form-data; boundary=xx", ""),
    ],
)
def test_a_body_that_holds_no_images_is_refused_with_a_sentence(live, body, kind, words):
    answer = live.post("/predict", body, content_type=kind)
    assert answer.status == 400
    assert words in answer.json["error"]
    assert answer.headers["content-type"] == "application/json"


def test_top_says_how_many_classes(live):
    data = encoded_pictures()[0]
    assert len(live.post("/predict?top=2", data).json["images"][0]["classes"]) == 2
    assert len(live.post("/predict?top=99", data).json["images"][0]["classes"]) == 5
    for top in ("0", "-1", "x", "", "1e3", "%C2%B2"):
        assert live.post(f"/predict?top={top}", data).status == 400


def test_the_answer_says_where_the_time_went(live):
    answer = live.post("/predict", encoded_pictures()[0])
    names = [part.split(";")[0] for part in answer.headers["server-timing"].split(", ")]
    assert names == ["read", "queue", "decode", "infer", "batch"]


def test_several_models_are_asked_by_name(run, tmp_path):
    other = write_golden_run(tmp_path / "other")
    data = encoded_pictures()[0]
    with serving(run.path, other.path) as live:
        assert live.post("/predict", data).json["model"] == "digits"
        assert live.post("/models/other/predict", data).json["model"] == "other"
        answer = live.post("/models/third/predict", data)
        assert answer.status == 404
        assert "third" in answer.json["error"]
        assert [model["name"] for model in live.get("/models").json["models"]] == ["digits", "other"]


def test_limits_are_kept(run):
    data = encoded_pictures()[0]
    with serving(run.path, max_body_mib=0.01, max_images=2, max_pixels=900) as live:
        assert live.post("/predict", b"x" * 20_000).status == 413
        body, kind = form(*[("a", b"x")] * 3)
        assert live.post("/predict", body, content_type=kind).status == 413
        many = json.dumps({"images": ["", "", ""]}).encode()
        assert live.post("/predict", many, content_type="application/json").status == 413
        answer = live.post("/predict", data)  # 40 x 24 pixels
        assert answer.status == 400
        assert "too many pixels" in answer.json["error"]


def test_a_bomb_is_refused_by_its_header(live):
    stream = io.BytesIO()
    picture(0).save(stream, "JPEG")
    data = bytearray(stream.getvalue())
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = b"\xff\xff\xff\xff"  # height, width
    answer = live.post("/predict", bytes(data))
    assert answer.status == 400
    assert "too many pixels" in answer.json["error"]


def test_keys_are_asked_for_but_not_of_an_orchestrator(run):
    data = encoded_pictures()[0]
    with serving(run.path, keys=(b"first", b"second")) as live:
        assert live.post("/predict", data).status == 401
        assert live.post("/predict", data, authorization="Bearer third").status == 401
        assert live.post("/predict", data, authorization="Basic first").status == 401
        assert live.post("/predict", data, x_api_key="").status == 401
        assert live.post("/predict", data, authorization="Bearer second").status == 200
        assert live.post("/predict", data, x_api_key="first").status == 200
        assert live.get("/metrics").status == 401
        assert live.get("/v2/health/ready").status == 200


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nowhere", 404), ("GET", "/predict", 405)])
def test_what_is_not_there_is_said_in_json(live, method, path, status):
    answer = live.ask(method, path)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert path in answer.json["error"]
    assert "/docs" in answer.json["error"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_request_ids_come_back_unless_they_could_forge_a_line(live):
    data = encoded_pictures()[0]
    assert live.post("/predict", data, x_request_id="abc-123").headers["x-request-id"] == "abc-123"
    assert live.post("/predict", data, x_request_id='a" b').headers["x-request-id"] != 'a" b'


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
def test_a_picture_in_any_mode_is_answered(live, mode):
    stream = io.BytesIO()
    given = picture(1)
    if mode == "I;16":
        given = given.convert("L").point(lambda value: 256 * value, "I")
    given.convert(mode).save(stream, "TIFF")
    assert live.post("/predict", stream.getvalue()).status == 200


def test_a_bug_is_a_500_in_json_that_tells_nothing_and_leaves_a_trace(live, monkeypatch):
    said = []
    monkeypatch.setattr(live.server, "say", said.append)
    monkeypatch.setattr(live.server.models["digits"].batcher, "decode", lambda data: 1 / 0)
    answer = live.post("/predict", encoded_pictures()[0], x_request_id="r7")
    assert answer.status == 500
    assert "r7" in answer.json["error"]
    assert "ZeroDivisionError" not in answer.json["error"]
    assert "ZeroDivisionError" in said[0]
    monkeypatch.undo()
    assert live.post("/predict", encoded_pictures()[0]).status == 200


def test_an_estimate_above_the_deadline_is_tried_and_mended(run):
    with serving(run.path, deadline_ms=500) as live:
        (model,) = live.server.models.values()
        model.batcher.seconds_per_image = live.server.pool.decode_seconds = 3.0
        for _ in range(40):
            assert live.post("/predict", encoded_pictures()[0]).status == 200
        assert model.batcher.seconds_per_image < 0.1
        assert live.server.pool.decode_seconds < 0.1


def test_a_key_may_have_any_letters(run):
    key = "schlüssel".encode()
    with serving(run.path, keys=(key,)) as live:
        assert live.post("/predict", encoded_pictures()[0], x_api_key=key).status == 200
        assert live.post("/predict", encoded_pictures()[0], authorization=b"Bearer " + key).status == 200


def test_what_files_were_is_counted(run):
    def encoded(mode, kind, **options):
        stream = io.BytesIO()
        Image.new(mode, (9, 7)).save(stream, kind, **options)
        return stream.getvalue()

    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    upright, turned, grey = encoded("RGB", "JPEG"), encoded("RGB", "JPEG", exif=exif), encoded("LA", "PNG")
    with serving(run.path) as live:
        for data in (upright, turned, turned, grey, b"no image"):
            live.post("/predict", data)
        lines = live.get("/metrics").body.decode().splitlines()
    found = {line for line in lines if line.startswith("dsimg_decoded_images_total")}
    assert found == {
        f'dsimg_decoded_images_total{{format="{kind}",mode="{mode}",model="digits",rotated="{rotated}"}} {count}'
        for kind, mode, rotated, count in (
            ("JPEG", "RGB", "no", "1.0"),
            ("JPEG", "RGB", "yes", "2.0"),
            ("PNG", "LA", "no", "1.0"),
        )
    }


def test_a_network_that_gives_nan_is_the_server_s_fault(run):
    def nothing(names, inputs):
        return [np.full((len(inputs[INPUT]), 5), np.nan, np.float32)]

    data = encoded_pictures()[0]
    with serving(run.path, lone_threads=1) as live:
        (model,) = live.server.models.values()
        model.batcher.network = _network(SimpleNamespace(session=SimpleNamespace(run=nothing)))
        answer = live.post("/predict", data)
        body, kind = form(("bad", b"no image"), ("good", data))
        both = live.post("/predict", body, content_type=kind)
    assert answer.status == 500
    assert answer.json["error"] == answer.json["images"][0]["error"] == "the network gave NaN or infinity"
    assert both.status == 500
    assert both.json["error"] == "no image has an answer"


@pytest.mark.parametrize("seconds", ["inf", "1_0", "nan", "0", "-1", "one", ""])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(live, seconds):
    answer = live.post("/predict", encoded_pictures()[0], x_request_timeout=seconds)
    assert (answer.status, "X-Request-Timeout" in answer.json["error"]) == (400, True)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_packed_body_is_unpacked(live, encoding, pack):
    data = encoded_pictures()[0]
    plain, packed = live.post("/predict", data), live.post("/predict", pack(data), content_encoding=encoding)
    assert packed.json == plain.json
    body, kind = form(("a", data))
    assert live.post("/predict", pack(body), content_encoding=encoding, content_type=kind).status == 200


def test_what_a_packed_body_unpacks_to_is_bounded(run):
    with serving(run.path, max_body_mib=0.1) as live:
        answer = live.post("/predict", gzip.compress(bytes(2**20)), content_encoding="gzip")
    assert answer.status == 413
    assert "larger than 104857 bytes" in answer.json["error"]


def test_a_body_packed_otherwise_is_refused(live):
    answer = live.post("/predict", encoded_pictures()[0], content_encoding="br")
    assert answer.status == 415
    assert answer.headers["accept-encoding"] == "gzip, deflate"
