"""The Open Inference Protocol, spoken by clients that others wrote."""

import asyncio
import base64
import json

import numpy as np
import pytest
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from dsimg.preprocess import Preprocess, preprocess_image
from tests.export.files import noise
from tests.export.golden_runs import encoded_pictures


@pytest.fixture
def client(live):
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{live.port}", network_timeout=20) as found:
        yield found


def expected(live, images):
    model = live.server.models["digits"]
    return model.served.session.run(None, {"images": images})[0]


def images_input(images, binary, datatype="FP32"):
    found = tritonclient.http.InferInput("images", images.shape, datatype)
    found.set_data_from_numpy(images, binary_data=binary)
    return found


def test_health_and_metadata(live, client):
    version = live.server.models["digits"].version
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("digits")
    assert client.is_model_ready("digits", version)
    assert not client.is_model_ready("digits", "7")
    assert not client.is_model_ready("nope")
    assert {"binary_tensor_data", "classification"} <= set(client.get_server_metadata()["extensions"])
    metadata = client.get_model_metadata("digits")
    assert metadata["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, 3, 16, 16]}]
    assert metadata["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 5]}]
    assert metadata["versions"] == [version]
    config = client.get_model_config("digits")
    assert config["max_batch_size"] == 64
    assert config["input"][0]["dims"] == [3, 16, 16]
    (entry,) = client.get_model_repository_index()
    assert (entry["name"], entry["state"]) == ("digits", "READY")


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_the_sync_client_gets_the_logits(live, client, binary_in, binary_out, count):
    images = noise(count)
    outputs = None if binary_out is None else [tritonclient.http.InferRequestedOutput("logits", binary_data=binary_out)]
    found = client.infer("digits", [images_input(images, binary_in)], outputs=outputs, request_id="r1")
    assert found.get_response()["id"] == "r1"
    np.testing.assert_allclose(found.as_numpy("logits"), expected(live, images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(live, client, algorithm):
    images = noise(2)
    found = client.infer("digits", [images_input(images, True)], request_compression_algorithm=algorithm)
    np.testing.assert_allclose(found.as_numpy("logits"), expected(live, images), rtol=1e-5, atol=1e-6)


def test_the_asyncio_client_gets_the_logits(live):
    images = noise(2)

    async def body():
        async with tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{live.port}") as aio:
            assert await aio.is_server_ready()
            given = tritonclient.http.aio.InferInput("images", images.shape, "FP32")
            given.set_data_from_numpy(images)
            return await asyncio.gather(*(aio.infer("digits", [given]) for _ in range(20)))

    for found in asyncio.run(body()):
        np.testing.assert_allclose(found.as_numpy("logits"), expected(live, images), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("binary", [True, False])
def test_classification_gives_labels(live, client, binary):
    images = noise(2)
    asked = tritonclient.http.InferRequestedOutput("logits", binary_data=binary, class_count=2)
    found = client.infer("digits", [images_input(images, True)], outputs=[asked]).as_numpy("logits")
    logits = expected(live, images)
    classes = live.server.models["digits"].classes
    assert found.shape == (2, 2)
    for row, values in zip(found, logits, strict=True):
        value, index, label = (row[0].decode() if isinstance(row[0], bytes) else row[0]).split(":", 2)
        assert int(index) == values.argmax()
        assert label == classes[int(index)]
        assert float(value) == pytest.approx(values.max(), abs=1e-5)


@pytest.mark.parametrize("binary", [True, False])
def test_encoded_images_are_taken_as_bytes(live, run, client, binary):
    encoded = encoded_pictures()
    preprocess = Preprocess.from_dict(run.model["preprocess"])
    images = np.stack([preprocess_image(data, preprocess) for data in encoded])
    if binary:
        given = images_input(np.array(encoded, dtype=object), True, "BYTES")
        found = client.infer("digits", [given]).as_numpy("logits")
    else:
        data = [base64.b64encode(one).decode() for one in encoded]
        body = {"inputs": [{"name": "images", "shape": [3], "datatype": "BYTES", "data": data}]}
        answer = live.post("/v2/models/digits/infer", json.dumps(body).encode()).json["outputs"][0]
        found = np.array(answer["data"], np.float32).reshape(answer["shape"])
    np.testing.assert_allclose(found, expected(live, images), rtol=1e-5, atol=1e-6)


def test_an_encoded_image_that_cannot_be_read_is_named(client):
    given = images_input(np.array([encoded_pictures()[0], b"no image"], dtype=object), True, "BYTES")
    with pytest.raises(InferenceServerException, match="image 1: not an image"):
        client.infer("digits", [given])


def test_errors_come_as_the_client_reads_them(client):
    images = noise(1)
    cases = [
        ("nope", images, "FP32", "images", "unknown model: 'nope'"),
        ("digits", images.astype(np.float64), "FP64", "images", "data-type is 'FP64', but model 'digits' expects"),
        ("digits", images, "FP32", "pixels", "unexpected inference input 'pixels'"),
        ("digits", images[:, :, :8], "FP32", "images", "shape"),
        ("digits", noise(65), "FP32", "images", "batch"),
    ]
    for model, data, datatype, name, words in cases:
        given = tritonclient.http.InferInput(name, data.shape, datatype)
        given.set_data_from_numpy(data)
        with pytest.raises(InferenceServerException, match=words):
            client.infer(model, [given])
    with pytest.raises(InferenceServerException, match="version 7 is not found"):
        client.infer("digits", [images_input(images, True)], model_version="7")


@pytest.mark.parametrize("timeout", ["soon", -1, 0.5, True])
def test_a_timeout_that_is_no_number_of_microseconds_is_refused(live, timeout):
    given = {"name": "images", "shape": [1, 3, 16, 16], "datatype": "FP32", "data": noise(1).ravel().tolist()}
    answer = live.post(
        "/v2/models/digits/infer", json.dumps({"inputs": [given], "parameters": {"timeout": timeout}}).encode()
    )
    assert answer.status == 400
    assert answer.json == {"error": "'timeout' must be a whole number of microseconds, from 0 on."}


def test_the_index_may_be_of_ready_models_alone(live):
    def index(body):
        return live.post("/v2/repository/index", body)

    entry = {"name": "digits", "version": live.server.models["digits"].version, "state": "READY"}
    assert index(b"").json == index(b"{}").json == index(b'{"ready": true}').json == [entry]
    live.server.draining = True
    try:
        assert index(b'{"ready": false}').json == [{**entry, "state": "LOADING"}]
        assert index(b'{"ready": true}').json == []
    finally:
        live.server.draining = False
    for body, words in [(b"{", "failed to parse"), (b"[]", "JSON object"), (b'{"ready": 1}', "true or false")]:
        answer = index(body)
        assert answer.status == 400
        assert words in answer.json["error"]


def test_a_slash_too_many_is_an_error_that_can_be_read(live):
    answer = live.post("/v2/models/digits/infer/", b"{}")
    error = "there is no /v2/models/digits/infer/ here; GET /docs lists what there is."
    assert (answer.status, answer.json) == (404, {"error": error})


def test_statistics_count(live, client):
    before = client.get_inference_statistics("digits")["model_stats"][0]
    client.infer("digits", [images_input(noise(3), True)])
    after = client.get_inference_statistics("digits")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 3
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 1
    assert client.get_inference_statistics()["model_stats"][0]["name"] == "digits"


def test_a_deadline_of_triton_s_clients_is_kept(live, client):
    with pytest.raises(InferenceServerException, match="its deadline has passed"):
        client.infer("digits", [images_input(noise(1), True)], timeout=1)


def test_the_generated_client_of_the_protocol_s_own_specification(live):
    openapi = pytest.importorskip("open_inference.openapi.client")
    import httpx
    from open_inference.openapi.types import InferenceRequest

    images = noise(1)
    with httpx.Client(timeout=20) as http:
        client = openapi.OpenInferenceClient(base_url=f"http://127.0.0.1:{live.port}", httpx_client=http)
        client.check_server_readiness()
        client.check_model_readiness("digits")
        assert client.read_model_metadata("digits").name == "digits"
        given = {"name": "images", "shape": list(images.shape), "datatype": "FP32", "data": images.ravel().tolist()}
        found = client.model_infer("digits", request=InferenceRequest(inputs=[given]))
    np.testing.assert_allclose(found.outputs[0].data.__root__, expected(live, images)[0], rtol=1e-5, atol=1e-6)


def test_kserve_s_client(live):
    kserve = pytest.importorskip("kserve", reason="pip install kserve (67 packages) to run this one")
    images = noise(2)

    async def body():
        client = kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2"))
        base = f"http://127.0.0.1:{live.port}"
        assert await client.is_server_live(base)
        assert await client.is_server_ready(base)
        assert await client.is_model_ready(base, "digits")
        found = []
        for binary in (True, False):
            given = kserve.InferInput("images", list(images.shape), "FP32")
            given.set_data_from_numpy(images, binary_data=binary)
            request = kserve.InferRequest("digits", [given], parameters={"binary_data_output": binary})
            found.append((await client.infer(base, request, model_name="digits")).outputs[0].as_numpy())
        return found

    for logits in asyncio.run(body()):
        np.testing.assert_allclose(logits, expected(live, images), rtol=1e-5, atol=1e-6)


def test_the_confidence_of_these_clients_answers_is_counted_too(live, client):
    def counted():
        (line,) = [
            line for line in live.get("/metrics").body.decode().splitlines() if "dsimg_confidence_count{" in line
        ]
        return float(line.split()[-1])

    client.infer("digits", [images_input(noise(1), True)])
    before = counted()
    client.infer("digits", [images_input(noise(3), True)])
    assert counted() == before + 3
