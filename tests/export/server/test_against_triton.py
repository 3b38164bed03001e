"""The server beside a real tritonserver: the same bytes to both, and a reason for each difference in their answers.

pip install nvidia-pytriton, in a virtual environment VENV of this Python's version; then

    DSIMG_TRITONSERVER=$VENV/lib/python3.11/site-packages/pytriton/tritonserver/bin/tritonserver \\
        pytest tests/export/server/test_against_triton.py
"""

import contextlib
import gzip
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.conftest import free_port
from tests.export.files import noise
from tests.export.golden_runs import encoded_pictures, write_golden_run
from tests.export.server.live import Answer, ask, serving

TRITONSERVER = os.environ.get("DSIMG_TRITONSERVER")
if TRITONSERVER is None:
    pytest.skip("DSIMG_TRITONSERVER names no tritonserver to compare with.", allow_module_level=True)

CONFIG = """
name: "digits"
backend: "python"
max_batch_size: 64
input [ { name: "images" data_type: TYPE_FP32 dims: [ 3, 16, 16 ] } ]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ 5 ] label_filename: "labels.txt" } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
dynamic_batching { }
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""

# What Triton runs, in a process of its own: the served file. Tensors travel by DLPack, since this Triton was built for
# NumPy 1, and takes arrays of NumPy 2 for empty ones. It also writes to its log that it cannot end their capsules.
MODEL = """
import pathlib
import sys
sys.path.insert(0, PACKAGES)  # PYTHONPATH does not get there
import numpy
import onnxruntime
import triton_python_backend_utils as utils

class TritonPythonModel:
    def initialize(self, args):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        file = pathlib.Path(__file__).with_name("model.onnx")
        self.session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def execute(self, requests):
        answers = []
        for request in requests:
            images = numpy.from_dlpack(utils.get_input_tensor_by_name(request, "images"))
            (logits,) = self.session.run(["logits"], {"images": images})
            answers.append(utils.InferenceResponse([utils.Tensor.from_dlpack("logits", logits)]))
        return answers
"""


def backend_folder(pytriton: Path, folder: Path) -> Path:
    """Write a folder of backends with the Python one and the process that runs models with this version of Python."""
    python = folder / "python"
    shutil.copytree(pytriton / "tritonserver" / "backends" / "python", python)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stubs = pytriton / "tritonserver" / "python_backend_stubs"
    shutil.copy(stubs / version / "triton_python_backend_stub", python)
    return folder


def write_repository(folder: Path, run: Path) -> Path:
    """Write a model repository with the network of a run, by the name of its folder."""
    model, packages = folder / run.name, Path(onnxruntime.__file__).parents[1]
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    shutil.copy(run / "labels.txt", model)
    (model / "1" / "model.py").write_text(MODEL.replace("PACKAGES", repr(str(packages))))
    shutil.copy(run / "model.onnx", model / "1")
    return folder


@contextlib.contextmanager
def tritonserver(run: Path, folder: Path) -> Iterator[int]:
    """Run Triton with the network of a run, and give its port."""
    binary = Path(TRITONSERVER)
    packages = binary.parents[3]
    port, *others = (free_port() for _ in range(3))
    libraries = (packages / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR"))
    command = [
        binary,
        f"--model-repository={write_repository(folder / 'repository', run)}",
        f"--backend-directory={backend_folder(packages / 'pytriton', folder / 'backends')}",
        *(f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")),
        *(f"--{kind}-port={number}" for kind, number in zip(("http", "grpc", "metrics"), (port, *others), strict=True)),
        "--allow-gpu-metrics=false",
    ]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, libraries))}
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, (folder / "log.txt").read_text()
            assert time.monotonic() < deadline, (folder / "log.txt").read_text()
            with contextlib.suppress(OSError):
                if ask(port, "GET", "/v2/health/ready").status == 200:
                    break
            time.sleep(0.2)
        yield port
        assert process.poll() is None, (folder / "log.txt").read_text()
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


@dataclass(frozen=True)
class Ask:
    """A request; VERSION in its path is the model's."""

    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)


def tensor(images: np.ndarray, **changes: Any) -> dict[str, Any]:
    """Return an input of a request in JSON."""
    return {
        "name": "images",
        "shape": list(images.shape),
        "datatype": "FP32",
        "data": images.ravel().tolist(),
        **changes,
    }


def packed(images: np.ndarray, **changes: Any) -> dict[str, Any]:
    """Return an input whose data are binary."""
    found = tensor(images, parameters={"binary_data_size": images.nbytes}, **changes)
    del found["data"]
    return found


def infer(content: object, data: bytes | None = None, *, length: object = None, to: str = "", **headers: str) -> Ask:
    """Return a request to infer: content in JSON, or as it is; then data, whose place a header names."""
    head = content if isinstance(content, bytes) else json.dumps(content).encode()
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if data is not None or length is not None:
        given["Inference-Header-Content-Length"] = str(len(head) if length is None else length)
    return Ask("POST", to or "/v2/models/digits/infer", head + (data or b""), given)


def output(**parameters: Any) -> list[dict[str, Any]]:
    return [{"name": "logits", "parameters": parameters}]


def requests() -> dict[str, Ask]:
    """Return what is asked of both, by name."""
    one, three = noise(1), noise(3, seed=1)
    plain = {"inputs": [tensor(one)]}
    text = json.dumps(plain).encode()
    binary = {"inputs": [packed(three)]}
    raw = three.tobytes()
    model = "/v2/models/digits"
    picture = encoded_pictures()[0]
    bytes_input = {"name": "images", "shape": [1], "datatype": "BYTES"}
    return {
        "server": Ask("GET", "/v2"),
        "server, with a slash": Ask("GET", "/v2/"),
        "live": Ask("GET", "/v2/health/live"),
        "ready": Ask("GET", "/v2/health/ready"),
        "model ready": Ask("GET", f"{model}/ready"),
        "version ready": Ask("GET", f"{model}/versions/VERSION/ready"),
        "ready, unknown model": Ask("GET", "/v2/models/nope/ready"),
        "ready, unknown version": Ask("GET", f"{model}/versions/7/ready"),
        "metadata": Ask("GET", model),
        "metadata of the version": Ask("GET", f"{model}/versions/VERSION"),
        "metadata, unknown model": Ask("GET", "/v2/models/nope"),
        "metadata, unknown version": Ask("GET", f"{model}/versions/7"),
        "metadata, version is no number": Ask("GET", f"{model}/versions/x"),
        "config": Ask("GET", f"{model}/config"),
        "config of the version": Ask("GET", f"{model}/versions/VERSION/config"),
        "config, unknown model": Ask("GET", "/v2/models/nope/config"),
        "statistics": Ask("GET", f"{model}/stats"),
        "statistics of all": Ask("GET", "/v2/models/stats"),
        "statistics, unknown model": Ask("GET", "/v2/models/nope/stats"),
        "index": Ask("POST", "/v2/repository/index", b""),
        "index, ready only": Ask("POST", "/v2/repository/index", b'{"ready": true}'),
        "index, ready is a string": Ask("POST", "/v2/repository/index", b'{"ready": "yes"}'),
        "index, an empty object": Ask("POST", "/v2/repository/index", b"{}"),
        "index, a list": Ask("POST", "/v2/repository/index", b"[]"),
        "index, GET": Ask("GET", "/v2/repository/index"),
        "index, malformed": Ask("POST", "/v2/repository/index", b"{"),
        "load": Ask("POST", "/v2/repository/models/digits/load", b"{}"),
        "shared memory": Ask("GET", "/v2/systemsharedmemory/status"),
        "unknown path": Ask("GET", "/v2/nope"),
        "metadata, with a slash": Ask("GET", f"{model}/"),
        "infer, with a slash": infer(plain, to=f"{model}/infer/"),
        "infer, a query": infer(plain, to=f"{model}/infer?x=1"),
        "metadata, escaped": Ask("GET", "/v2/models/d%69gits"),
        "unknown root": Ask("GET", "/nope"),
        "JSON": infer(plain),
        "JSON, nested": infer({"inputs": [tensor(three, data=three.tolist())]}),
        "JSON, half nested": infer({"inputs": [tensor(three, data=three.reshape(3, -1).tolist())]}),
        "JSON, whole numbers": infer({"inputs": [tensor(np.ones((1, 3, 16, 16), int))]}),
        "JSON, a type": infer(plain, Content_Type="application/json"),
        "JSON, another type": infer(plain, Content_Type="text/plain"),
        "JSON, unknown keys": infer({**plain, "model_name": "other", "x": [1]}),
        "JSON, unknown parameters": infer({**plain, "parameters": {"x": 1, "y": "z", "w": 1.5, "v": True}}),
        "JSON, parameters of the input": infer({"inputs": [tensor(one, parameters={"x": 1})]}),
        "JSON, a parameter is a list": infer({**plain, "parameters": {"x": [1]}}),
        "JSON, parameters are a list": infer({**plain, "parameters": [1]}),
        "JSON, its length said": infer(plain, length=len(text)),
        "JSON, an id": infer({**plain, "id": "r-1 \u00e9"}),
        "JSON, an empty id": infer({**plain, "id": ""}),
        "JSON, the id is a number": infer({**plain, "id": 7}),
        "JSON, null for what is optional": infer({**plain, "id": None, "outputs": None, "parameters": None}),
        "JSON, no outputs": infer({**plain, "outputs": []}),
        "the version": infer(plain, to=f"{model}/versions/VERSION/infer"),
        "a batch of 64": infer({"inputs": [packed(noise(64))]}, noise(64).tobytes()),
        "a batch of 65": infer({"inputs": [packed(noise(65))]}, noise(65).tobytes()),
        "a batch of 0": infer({"inputs": [tensor(noise(0))]}),
        "a batch of 0, binary": infer({"inputs": [packed(noise(0))]}, b""),
        "binary in": infer(binary, raw),
        "binary in and out": infer({**binary, "outputs": output(binary_data=True)}, raw),
        "binary out": infer({**plain, "outputs": output(binary_data=True)}),
        "binary out of all": infer({**plain, "parameters": {"binary_data_output": True}}),
        "binary out of all, not of this": infer(
            {**plain, "parameters": {"binary_data_output": True}, "outputs": output(binary_data=False)}
        ),
        "binary out of all, outputs named": infer(
            {**plain, "parameters": {"binary_data_output": True}, "outputs": [{"name": "logits"}]}
        ),
        "binary_data is no flag": infer({**plain, "outputs": output(binary_data="yes")}),
        "binary in and out, an id": infer({**binary, "id": "b", "parameters": {"binary_data_output": True}}, raw),
        "best 2": infer({**binary, "outputs": output(classification=2)}, raw),
        "best 2, binary": infer({**binary, "outputs": output(classification=2, binary_data=True)}, raw),
        "best 9 of 5": infer({**plain, "outputs": output(classification=9)}),
        "best 0": infer({**plain, "outputs": output(classification=0)}),
        "best -1": infer({**plain, "outputs": output(classification=-1)}),
        "best 'x'": infer({**plain, "outputs": output(classification="x")}),
        "gzip": infer(gzip.compress(text), Content_Encoding="gzip"),
        "deflate": infer(zlib.compress(text), Content_Encoding="deflate"),
        "identity": infer(plain, Content_Encoding="identity"),
        "gzip, binary": Ask(
            "POST",
            f"{model}/infer",
            gzip.compress(json.dumps(binary).encode() + raw),
            {"Content-Encoding": "gzip", "Inference-Header-Content-Length": str(len(json.dumps(binary)))},
        ),
        "gzip, damaged": infer(gzip.compress(text)[:-9] + b"xxxxxxxxx", Content_Encoding="gzip"),
        "gzip, cut off": infer(gzip.compress(text)[:100], Content_Encoding="gzip"),
        "gzip, none": infer(plain, Content_Encoding="gzip"),
        "another compression": infer(plain, Content_Encoding="br"),
        "gzip wanted": infer({**binary, "outputs": output(binary_data=True)}, raw, Accept_Encoding="gzip"),
        "raw": infer(one.tobytes(), length=0),
        "raw, too short": infer(one.tobytes()[:-4], length=0),
        "raw, too long": infer(one.tobytes() + b"four", length=0),
        "raw, nothing": infer(b"", length=0),
        "raw, three images": infer(raw, length=0),
        "unknown model": infer(plain, to="/v2/models/nope/infer"),
        "unknown version": infer(plain, to=f"{model}/versions/7/infer"),
        "wrong type": infer({"inputs": [tensor(one, datatype="FP64")]}),
        "wrong type, binary": infer(
            {"inputs": [packed(one.astype(float), datatype="FP64")]}, one.astype(float).tobytes()
        ),
        "unknown type": infer({"inputs": [tensor(one, datatype="FLOAT")]}),
        "no type": infer({"inputs": [{"name": "images", "shape": [1, 3, 16, 16], "data": one.ravel().tolist()}]}),
        "wrong shape": infer({"inputs": [tensor(one[:, :, :8])]}),
        "wrong rank": infer({"inputs": [tensor(one[0])]}),
        "negative shape": infer({"inputs": [tensor(one, shape=[-1, 3, 16, 16])]}),
        "huge shape": infer({"inputs": [tensor(one, shape=[2**62, 3, 16, 16])]}),
        "shape of strings": infer({"inputs": [tensor(one, shape=["1", "3", "16", "16"])]}),
        "no shape": infer({"inputs": [{"name": "images", "datatype": "FP32", "data": one.ravel().tolist()}]}),
        "unknown input": infer({"inputs": [tensor(one, name="pixels")]}),
        "no name": infer({"inputs": [{"shape": [1, 3, 16, 16], "datatype": "FP32", "data": one.ravel().tolist()}]}),
        "another input too": infer({"inputs": [tensor(one), tensor(one, name="pixels")]}),
        "an input twice": infer({"inputs": [tensor(one), tensor(one)]}),
        "unknown output": infer({**plain, "outputs": [{"name": "scores"}]}),
        "an output twice": infer({**plain, "outputs": [{"name": "logits"}, {"name": "logits"}]}),
        "no inputs": infer({"inputs": []}),
        "inputs missing": infer({}),
        "inputs is an object": infer({"inputs": {}}),
        "an input is a number": infer({"inputs": [1]}),
        "outputs is a string": infer({**plain, "outputs": "logits"}),
        "no data": infer({"inputs": [{"name": "images", "shape": [1, 3, 16, 16], "datatype": "FP32"}]}),
        "empty body": infer(b""),
        "no body": Ask("POST", f"{model}/infer"),
        "malformed": infer(text[:-1]),
        "malformed after the end": infer(text + b"}"),
        "not UTF-8": infer(b'{"id": "\xff", ' + text[1:]),
        "a list": infer([plain]),
        "null": infer(b"null"),
        "data of NaN": infer({"inputs": [tensor(one, data=[math.nan] * one.size)]}),
        "data too short": infer({"inputs": [tensor(one, data=[1.0, 2.0])]}),
        "data too long": infer({"inputs": [tensor(one, data=[*one.ravel().tolist(), 1.0])]}),
        "data nested otherwise": infer({"inputs": [tensor(one, data=one.reshape(16, -1).tolist())]}),
        "data of strings": infer({"inputs": [tensor(one, data=["1"] * one.size)]}),
        "data of booleans": infer({"inputs": [tensor(one, data=[True] * one.size)]}),
        "data of nulls": infer({"inputs": [tensor(one, data=[None] * one.size)]}),
        "data is a number": infer({"inputs": [tensor(one, data=1.0)]}),
        "data of 1e999": infer(
            json.dumps({"inputs": [tensor(one, data=[0] * one.size)]}).encode().replace(b"[0,", b"[1e999,")
        ),
        "data beyond FP32": infer({"inputs": [tensor(one, data=[1e300] * one.size)]}),
        "binary data larger than the body": infer(binary, raw[:-4]),
        "binary data smaller than the body": infer(binary, raw + b"four"),
        "binary data not of the shape": infer({"inputs": [packed(three, shape=[2, 3, 16, 16])]}, raw),
        "binary data's size is a string": infer(
            {"inputs": [{**packed(three), "parameters": {"binary_data_size": "9216"}}]}, raw
        ),
        "binary data's size is negative": infer(
            {"inputs": [{**packed(three), "parameters": {"binary_data_size": -1}}]}, raw
        ),
        "binary data without the header": Ask("POST", f"{model}/infer", json.dumps(binary).encode() + raw),
        "binary data and JSON": infer({"inputs": [{**tensor(three), **packed(three)}]}, raw),
        "the header is larger than the body": infer(plain, length=10**6),
        "the header is too small": infer(plain, length=10),
        "the header is no number": infer(plain, length="x"),
        "the header is negative": infer(plain, length=-1),
        "shared memory input": infer(
            {
                "inputs": [
                    {**packed(one), "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": one.nbytes}}
                ]
            }
        ),
        "GET infer": Ask("GET", f"{model}/infer"),
        "PUT infer": Ask("PUT", f"{model}/infer", text),
        "DELETE a model": Ask("DELETE", model),
        "POST metadata": Ask("POST", model, b"{}"),
        "POST server": Ask("POST", "/v2", b"{}"),
        "POST live": Ask("POST", "/v2/health/live", b""),
        "HEAD live": Ask("HEAD", "/v2/health/live"),
        "HEAD ready": Ask("HEAD", f"{model}/ready"),
        "POST config": Ask("POST", f"{model}/config", b"{}"),
        "POST stats": Ask("POST", f"{model}/stats", b"{}"),
        "an image file": infer(
            {"inputs": [{**bytes_input, "parameters": {"binary_data_size": 4 + len(picture)}}]},
            struct.pack("<I", len(picture)) + picture,
        ),
        "timeout": infer({**plain, "parameters": {"timeout": 4_000_000}}),
        "timeout of 0": infer({**plain, "parameters": {"timeout": 0}}),
        "timeout is negative": infer({**plain, "parameters": {"timeout": -1}}),
        "timeout is a fraction": infer({**plain, "parameters": {"timeout": 4e6}}),
        "timeout is a string": infer({**plain, "parameters": {"timeout": "soon"}}),
        "priority": infer({**plain, "parameters": {"priority": 1}}),
        "sequence": infer({**plain, "parameters": {"sequence_id": 3, "sequence_start": True, "sequence_end": True}}),
    }


def leaves(content: Any, at: str = "") -> dict[str, Any]:
    """Return what stands at each place of JSON."""
    if isinstance(content, dict):
        return {k: v for key, value in content.items() for k, v in leaves(value, f"{at}.{key}").items()} or {at: {}}
    if isinstance(content, list):
        return {k: v for n, value in enumerate(content) for k, v in leaves(value, f"{at}[{n}]").items()} or {at: []}
    return {at: content}


def unpacked(entry: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return an output with its data, and the binary data that are left."""
    size = entry.get("parameters", {}).get("binary_data_size")
    if size is None:
        return entry, data
    mine, elements = data[:size], []
    assert len(mine) == size
    if entry["datatype"] == "FP32":
        return {**entry, "data": np.frombuffer(mine, "<f4").tolist()}, data[size:]
    while mine:
        (count,) = struct.unpack_from("<I", mine)
        elements.append(mine[4 : 4 + count].decode())
        mine = mine[4 + count :]
    return {**entry, "data": elements}, data[size:]


def facts(answer: Answer, version: str) -> dict[str, Any]:
    """Return what is compared of an answer that is no error: its type, and what stands at each place of its JSON."""
    found: dict[str, Any] = {"type": answer.headers["content-type"]}
    body = answer.body
    if "content-encoding" in answer.headers:
        found["encoding"], body = answer.headers["content-encoding"], zlib.decompress(body, 47)
    length = int(answer.headers.get("inference-header-content-length", len(body)))
    content, data = json.loads(body[:length]), body[length:]
    if "outputs" in content and "model_name" in content:
        for place, entry in enumerate(content["outputs"]):
            content["outputs"][place], data = unpacked(entry, data)
    assert not data
    values = leaves(content)
    found.update({k: "VERSION" if "version" in k and value == version else value for k, value in values.items()})
    return found


def same(ours: Any, theirs: Any) -> bool:
    if type(ours) is type(theirs) is float:
        return math.isclose(ours, theirs, abs_tol=1e-5)
    if isinstance(ours, str) and isinstance(theirs, str) and re.match(r"-?\d+\.\d+:", ours + theirs):  # a class
        (value, *rest), (other, *others) = ours.split(":"), theirs.split(":")
        return same(float(value), float(other)) and rest == others
    return type(ours) is type(theirs) and bool(ours == theirs)


def differences(ours: Answer, theirs: Answer, name: str, version: str) -> set[str]:
    """Return where two answers differ: the status, that Triton's has no body, or a place of the content."""
    for answer in (ours, theirs):
        if answer.status >= 400 and answer.body:  # HEAD has none
            assert list(answer.json) == ["error"]
            assert isinstance(answer.json["error"], str)
            assert answer.json["error"]
    if ours.status >= 400:
        assert ours.headers["content-type"] == "application/json"  # Triton's is now this, now text/plain
    if ours.status != theirs.status:
        return {f"{ours.status}, Triton {theirs.status}"}
    if ours.status >= 400:
        return set()
    if not theirs.body:
        assert isinstance(ours.json, dict)
        return {"JSON, Triton nothing"}
    mine, other = facts(ours, version), facts(theirs, "1")
    if name.startswith("config"):  # Triton's tells of all that a model might have
        other = {place: value for place, value in other.items() if place in mine}
    if name.startswith("statistics"):  # keys and types: counts and times are each server's own
        mine, other = ({re.sub(r"\[\d+\]", "[]", k): type(v) for k, v in each.items()} for each in (mine, other))
    places = {place for place in mine.keys() | other.keys() if not (place in mine and place in other)}
    places |= {place for place in mine.keys() & other.keys() if not same(mine[place], other[place])}
    return {re.split(r"(?<=\w)[\[.]", place)[0].lstrip(".") for place in places}


# What differs, why, and in which requests; docs/serving.md has it in short. Not compared: the sentences of errors.
ALLOWED: list[tuple[set[str], str, list[str]]] = [
    (
        {"400, Triton 500"},
        "what a client did wrong is no error of the server's: 500 sets off alarms, and clients try again",
        [
            "index, malformed",
            "index, ready is a string",
            "JSON, parameters are a list",
            "JSON, the id is a number",
            "binary_data is no flag",
            "best -1",
            "best 'x'",
            "gzip, damaged",
            "gzip, cut off",
            "no type",
            "no name",
            "no shape",
            "negative shape",
            "shape of strings",
            "inputs missing",
            "inputs is an object",
            "outputs is a string",
            "malformed",
            "malformed after the end",
            "a list",
            "null",
            "data too short",
            "data too long",
            "data of strings",
            "data of booleans",
            "data of nulls",
            "data is a number",
            "data of 1e999",
            "binary data's size is a string",
            "binary data's size is negative",
            "binary data without the header",
            "the header is too small",
            "timeout is negative",
            "timeout is a fraction",
            "timeout is a string",
        ],
    ),
    (
        {"400, Triton 200"},
        "Triton takes any nesting with the right count: images of another layout would get an answer, a wrong one",
        ["JSON, half nested", "data nested otherwise"],
    ),
    ({"400, Triton 200"}, "it is no object, so it does not say what is wanted", ["index, a list"]),
    ({"400, Triton 200"}, "NaN is not JSON, and in Triton's answer neither", ["data of NaN"]),
    ({"200, Triton 404"}, "a path may be escaped, and some names must be", ["metadata, escaped"]),
    ({"400, Triton 200"}, "JSON is UTF-8; Triton sends the bytes back, which no client can parse", ["not UTF-8"]),
    ({"400, Triton 200"}, "Triton makes it infinity, and answers NaN, which is not JSON", ["data beyond FP32"]),
    ({"400, Triton 200"}, "which of the two's parameters hold?", ["an output twice"]),
    (
        {"200, Triton 500"},
        "null stands for what is not given: clients with optional fields write it",
        ["JSON, null for what is optional"],
    ),
    (
        {"type", "outputs"},
        "Triton's documents say as we do: it holds for all outputs whose own binary_data does not override it",
        ["binary out of all, outputs named"],
    ),
    ({"200, Triton 400"}, "image files are taken besides tensors", ["an image file"]),
    (
        {"JSON, Triton nothing"},
        "the protocol has a body there, and KServe's client parses it",
        ["live", "ready", "model ready", "version ready"],
    ),
    (
        {"404, Triton 400"},
        "404 says that it is not there, as Triton's own metadata do",
        ["ready, unknown model", "ready, unknown version", "statistics, unknown model"],
    ),
    ({"200, Triton 405"}, "HTTP wants HEAD wherever GET is", ["HEAD live", "HEAD ready"]),
    ({"200, Triton 404"}, "the protocol's OpenAPI file has /v2/, its text /v2", ["server, with a slash"]),
    ({"name", "version", "extensions"}, "another server, with fewer extensions", ["server"]),
    (
        {"platform", "properties"},
        "Triton runs the file by its Python backend here; the protocol allows properties",
        ["metadata", "metadata of the version"],
    ),
    (
        {"platform", "backend"},
        "Triton runs the file by its Python backend here",
        ["config", "config of the version"],
    ),
    ({"encoding"}, "an answer is a few numbers a class, and a client must take it as it is", ["gzip wanted"]),
    ({"415, Triton 501"}, "415 is HTTP's word for it; 501 counts as the server's error", ["another compression"]),
    ({"404, Triton 503"}, "runs are named by --source, and exchanged by --reload", ["load"]),
    ({"404, Triton 200"}, "there is no shared memory, and the extensions do not name it", ["shared memory"]),
    ({"400, Triton 404"}, "there is no shared memory", ["shared memory input"]),
]
REASONS = {name: found for found, _, names in ALLOWED for name in names}
REQUESTS = requests()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Ours, Triton, and the version that ours gives the model. Each has answered a request, and has statistics."""
    run = write_golden_run(tmp_path_factory.mktemp("run") / "digits").path
    with tritonserver(run, tmp_path_factory.mktemp("triton")) as port, serving(run, workers=1) as live:
        version = live.server.models["digits"].version
        for each, its in ((live.port, version), (port, "1")):
            assert send(REQUESTS["JSON"], each, its).status == 200
        yield live.port, port, version


def send(one: Ask, port: int, version: str) -> Answer:
    return ask(port, one.method, one.path.replace("VERSION", version), one.body, **one.headers)


@pytest.mark.parametrize("name", REQUESTS)
def test_both_answer_alike(servers, name):
    port, triton, version = servers
    ours, theirs = send(REQUESTS[name], port, version), send(REQUESTS[name], triton, "1")
    assert differences(ours, theirs, name, version) == REASONS.get(name, set()), (ours, theirs)


def test_the_extensions_are_triton_s(servers):
    ours, theirs = (set(ask(port, "GET", "/v2").json["extensions"]) for port in servers[:2])
    assert ours < theirs


def test_the_table_is_of_requests_that_are_sent():
    names = [name for _, _, names in ALLOWED for name in names]
    assert len(names) == len(set(names))
    assert set(names) <= set(REQUESTS)
