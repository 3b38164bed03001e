"""The wire format of the Open Inference Protocol v2 (REST) with Triton's extensions: bytes and numpy, no HTTP.

github.com/kserve/open-inference-protocol, and docs/protocol of github.com/triton-inference-server/server. Triton's
sentences are used where it has one. A malformed request is 400, also where Triton says 500. Two things are allowed that
it refuses: null for an optional field that is not given, and FP16 in JSON.
"""

import base64
import itertools
import json
import math
import operator
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from dsimg.metrics import top_k
from dsimg_export.server.json_text import Most, load_json

HEADER = "Inference-Header-Content-Length"
EXTENSIONS = ("binary_tensor_data", "classification", "model_configuration", "statistics", "model_repository")

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BYTES": np.dtype(object),  # of `bytes`
}
DATATYPES = {dtype: name for name, dtype in DTYPES.items()}
# By the kind of dtype: the types of its values in JSON, and what to call them.
JSON_VALUES: dict[str, tuple[set[type], str]] = {
    "b": ({bool}, "true or false"),
    "u": ({int}, "whole numbers"),
    "i": ({int}, "whole numbers"),
    "f": ({int, float}, "finite numbers"),
    "O": ({str}, "plain base64"),
}
WBITS = {"gzip": 31, "deflate": 15}  # as zlib has them

Scalar = str | int | float | bool


class ProtocolError(Exception):
    """A request that gets no answer: `status` is HTTP's, the message goes into `{"error": ...}`."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """An input or output of a model. shape: batch first, -1 where any number will do."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tensor:
    """An input of a request. data: of the shape that was given; BYTES are an array of `bytes` objects.

    Data that came as binary are a view of the body: read-only, and aligned only by chance.
    """

    name: str
    datatype: str
    data: NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RequestedOutput:
    """An output that a request asks for."""

    name: str
    binary: bool
    classification: int  # this many of the best classes; 0: the logits


@dataclass(frozen=True, kw_only=True)
class InferRequest:
    """A request that fits its model. id: "" where the client gave none."""

    id: str
    parameters: dict[str, Scalar]
    inputs: tuple[Tensor, ...]
    outputs: tuple[RequestedOutput, ...]


def parse_infer(
    body: bytes,
    *,
    header_length: str | None,
    model: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    max_batch: int,
) -> InferRequest:
    """Return the request that a body holds: every input once, all of one batch size in 1..`max_batch`.

    header_length: what Inference-Header-Content-Length says, or None. None: the body is JSON. 0: the body is the bytes
    of the only input, of batch 1, and the answer is binary. Else: so many bytes of JSON, then the tensors.

    inputs: where a name is there several times, the input may be any of these. BYTES are base64 strings in JSON, and
    uint32 lengths before the elements in binary. A body without JSON is taken as the first spec that it has the length
    of; a BYTES spec has any, and the body is its one element.

    A request that names no outputs is for all of them. Raises ProtocolError.
    """
    length = json_length(body, header_length)
    if length == 0 and header_length is not None:
        every = tuple(RequestedOutput(name=spec.name, binary=True, classification=0) for spec in outputs)
        return InferRequest(id="", parameters={}, inputs=(_raw_input(body, model, inputs),), outputs=every)
    request = _load(body[:length], _needed(inputs, max_batch))
    identity = request.get("id")
    if not isinstance(identity, str | None):
        raise ProtocolError("'id' must be a string.")
    parameters = _parameters(request, "the request")
    return InferRequest(
        id=identity or "",
        parameters=parameters,
        inputs=_inputs(request, body, length, model, inputs, max_batch),
        outputs=_outputs(request, parameters, model, outputs),
    )


def parse_index(body: bytes) -> bool:
    """Return whether a request for the repository's index is for models that are ready alone. Raises ProtocolError."""
    ready = _load(body, Most()).get("ready", False) if body else False
    if not isinstance(ready, bool):
        raise ProtocolError("'ready' must be true or false.")
    return ready


def json_length(body: bytes, header_length: str | None) -> int:
    """Return how many bytes at the beginning of a body are JSON, by its header. Raises ProtocolError."""
    if header_length is None:
        return len(body)
    if not (header_length.isascii() and header_length.isdigit() and len(header_length) < 19):
        raise ProtocolError(f"{HEADER} must be the number of bytes of JSON, not '{_short(header_length)}'.")
    length = int(header_length)
    if length > len(body):
        raise ProtocolError(f"{HEADER} is {length}, but the body has {len(body)} bytes.")
    return length


def answer_infer(
    request: InferRequest,
    outputs: Mapping[str, NDArray[Any]],
    *,
    model: str,
    version: str,
    labels: Sequence[str],
    parameters: Mapping[str, Scalar] | None = None,
) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an answer.

    outputs: all that the request asks for, batch first; objects are the `bytes` of BYTES, and UTF-8 where they go into
    JSON. Classification makes BYTES (N, min(K, C)) of logits (N, C): `value:index:label`, of equal logits the lower
    index first, without a label from len(labels) on.

    Raises ProtocolError with status 500: NaN or infinity in JSON or in classification, bytes in JSON that are no text.
    """
    described: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for asked in request.outputs:
        data = outputs[asked.name]
        if asked.classification:
            data = _best(data, asked, labels)
        entry = {"name": asked.name, "datatype": DATATYPES[data.dtype], "shape": data.shape}
        if asked.binary:
            binary.append(_packed(data) if data.dtype.hasobject else data.tobytes())
            described.append({**entry, "parameters": {"binary_data_size": len(binary[-1])}})
        else:
            described.append({**entry, "data": _json_data(data, asked.name)})
    answer: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id:
        answer["id"] = request.id
    if parameters:
        answer["parameters"] = dict(parameters)
    head = json.dumps({**answer, "outputs": described}, allow_nan=False, separators=(",", ":")).encode()
    if any(asked.binary for asked in request.outputs):
        return b"".join((head, *binary)), {"Content-Type": "application/octet-stream", HEADER: str(len(head))}
    return head, {"Content-Type": "application/json"}


def error_body(message: str) -> bytes:
    """Return the body of an answer that is an error."""
    return json.dumps({"error": message}).encode()


def metadata(
    model: str,
    *,
    versions: Sequence[str],
    platform: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    properties: Mapping[str, str],
) -> dict[str, Any]:
    """Return what `GET /v2/models/{model}` answers."""
    tensors = {key: [asdict(spec) for spec in specs] for key, specs in (("inputs", inputs), ("outputs", outputs))}
    return {"name": model, "versions": list(versions), "platform": platform, **tensors, "properties": dict(properties)}


def server_metadata(version: str) -> dict[str, Any]:
    """Return what `GET /v2` answers."""
    return {"name": "dsimg", "version": version, "extensions": list(EXTENSIONS)}


def decompress(body: bytes, encoding: str, *, limit: int) -> bytes:
    """Return a body without its Content-Encoding.

    Raises ProtocolError: 415 unless the encoding is gzip, deflate or identity; 413 for more than `limit` bytes, found
    without making more than one beyond them; 400 for a body that is damaged or cut off.
    """
    name = encoding.strip().lower()
    if name not in ("", "identity", *WBITS):
        raise ProtocolError(f"Content-Encoding '{_short(name)}' is not supported. Send gzip or deflate.", status=415)
    if name in WBITS:
        stream = zlib.decompressobj(WBITS[name])
        try:
            body = stream.decompress(body, limit + 1)
        except zlib.error as error:
            raise ProtocolError(f"the body is not {name}, or is damaged: {error}.") from None
        if len(body) <= limit and (not stream.eof or stream.unused_data):
            raise ProtocolError(f"the body is not one whole {name} stream.")
    if len(body) > limit:
        raise ProtocolError(f"the body is larger than {limit} bytes. Send fewer images at a time.", status=413)
    return body


def _needed(specs: Sequence[TensorSpec], images: int) -> Most:
    """Return what so many images may need in JSON: nested as their shape, or as one string each."""
    shapes = [(images, *spec.shape[1:]) for spec in specs]
    return Most(
        lists=max(sum(itertools.accumulate(shape[:-1], operator.mul)) for shape in shapes),
        values=max(map(math.prod, shapes)),
        strings=images,
    )


def _load(text: bytes, most: Most) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON, send such values as binary data")

    try:
        request = load_json(text, most, parse_constant=refuse)
    except RecursionError:
        raise ProtocolError("failed to parse the request JSON buffer: it is nested too deeply.") from None
    except ValueError as error:  # of UTF-8, of JSON, of numbers of thousands of digits
        raise ProtocolError(f"failed to parse the request JSON buffer: {error}.") from None
    if not isinstance(request, dict):
        raise ProtocolError("the request must be a JSON object.")
    return request


def _inputs(
    request: dict[str, Any], body: bytes, offset: int, model: str, specs: Sequence[TensorSpec], max_batch: int
) -> tuple[Tensor, ...]:
    """Return the inputs, whose binary data are what the body holds from `offset` on."""
    tensors: dict[str, Tensor] = {}
    for entry in _entries(request, "inputs"):
        name = _name(entry, "input", model, specs, tensors)
        spec, shape = _spec(entry, name, model, specs)
        if not 1 <= shape[0] <= max_batch:
            bound = "<= " + str(max_batch) if shape[0] else ">= 1"
            raise ProtocolError(f"inference request batch-size must be {bound} for '{model}'")
        if any(len(other.data) != shape[0] for other in tensors.values()):
            raise ProtocolError(f"input '{name}' batch size does not match other inputs for '{model}'")
        size, given = _parameters(entry, f"input '{name}'").get("binary_data_size"), entry.get("data")
        if (size is None) == (given is None):
            raise ProtocolError(f"input '{name}' must have either 'data' or the parameter 'binary_data_size'.")
        if size is None:
            data = _from_json(given, shape, spec)
        elif type(size) is not int or size < 0:
            raise ProtocolError(f"'binary_data_size' of input '{name}' must be a number of bytes.")
        else:
            missing = offset + size - len(body)
            if missing > 0:
                error = f"unexpected size for input '{name}', expecting {missing} additional bytes for model '{model}'."
                raise ProtocolError(f"{error} {HEADER} says where the tensors begin.")
            data = _from_binary(body, offset, size, shape, spec)
            offset += size
        tensors[name] = Tensor(name=name, datatype=spec.datatype, data=data)
    names = list(dict.fromkeys(spec.name for spec in specs))
    if len(tensors) != len(names):
        lacking = [name for name in names if name not in tensors]
        error = f"expected {len(names)} inputs but got {len(tensors)} inputs for model '{model}'. Got inputs"
        raise ProtocolError(f"{error} {list(tensors)}, but missing required inputs {lacking}.")
    if offset != len(body):
        raise ProtocolError(f"unexpected additional input data for model '{model}': {len(body) - offset} bytes.")
    return tuple(tensors.values())


def _raw_input(body: bytes, model: str, specs: Sequence[TensorSpec]) -> Tensor:
    """Return the only input of a request without JSON."""
    if len({spec.name for spec in specs}) != 1:
        raise ProtocolError(f"{HEADER} cannot be 0: model '{model}' has several inputs.")
    for spec in specs:
        shape, dtype = (1, *spec.shape[1:]), DTYPES[spec.datatype]
        if dtype.hasobject and set(shape) == {1}:
            data = _objects([body], shape)
        elif not dtype.hasobject and min(shape) > 0 and math.prod(shape) * dtype.itemsize == len(body):
            data = _from_binary(body, 0, len(body), shape, spec)
        else:
            continue
        return Tensor(name=spec.name, datatype=spec.datatype, data=data)
    wanted = " or ".join(f"{spec.datatype} {_dims((1, *spec.shape[1:]))}" for spec in specs)
    raise ProtocolError(f"{HEADER} is 0, but the body's {len(body)} bytes are not {wanted}, for model '{model}'.")


def _spec(
    entry: dict[str, Any], name: str, model: str, specs: Sequence[TensorSpec]
) -> tuple[TensorSpec, tuple[int, ...]]:
    """Return the spec that an input is of, and its shape."""
    datatype, shape = entry.get("datatype"), entry.get("shape")
    if not isinstance(datatype, str):
        raise ProtocolError(f"'datatype' of input '{name}' must be a string.")
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ProtocolError(f"'shape' of input '{name}' must be a list of whole numbers from 0 on.")
    accepted = [spec for spec in specs if spec.name == name]
    typed = [spec for spec in accepted if spec.datatype == datatype]
    if not typed:
        known = "" if datatype in DTYPES else ", which is not supported"
        expected = " or ".join(dict.fromkeys(f"'{spec.datatype}'" for spec in accepted))
        error = f"inference input '{name}' data-type is '{_short(datatype)}'{known}, but model '{model}' expects"
        raise ProtocolError(f"{error} {expected}")
    for spec in typed:
        if len(shape) == len(spec.shape) and all(a in (-1, b) for a, b in zip(spec.shape, shape, strict=True)):
            return spec, tuple(shape)
    expected = " or ".join(_dims(spec.shape) for spec in typed)
    error = f"unexpected shape for input '{name}' for model '{model}'. Expected {expected}, got {_short(_dims(shape))}."
    raise ProtocolError(f"{error} The first dimension is the batch.")


def _from_json(given: Any, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
    """Return a tensor from JSON, flat or nested as its shape."""
    values: list[Any] = given if isinstance(given, list) else [given]
    depth = 1
    while depth < len(shape) and values and type(values[0]) is list:
        if not all(type(row) is list and len(row) == shape[depth] for row in values):
            break
        values, depth = list(chain.from_iterable(values)), depth + 1
    count = math.prod(shape)
    if not isinstance(given, list) or len(values) != count or (depth > 1 and len(given) != shape[0]):
        error = "Unable to parse 'data': Shape does not match true shape of 'data' field"
        raise ProtocolError(f"{error}: input '{spec.name}' is {_dims(shape)}, nested so or one list of {count} values.")
    dtype = DTYPES[spec.datatype]
    types, what = JSON_VALUES[dtype.kind]
    try:
        if not types.issuperset(map(type, values)):
            raise ValueError("another type was found")
        if dtype.hasobject:
            return _objects([base64.b64decode(value, validate=True) for value in values], shape)
        with np.errstate(over="ignore"):
            array = np.array(values, dtype)
        if not np.isfinite(array).all():  # 1e999 is JSON
            raise OverflowError("a number is too large")
    except (ValueError, OverflowError) as error:
        where = f"input '{spec.name}' is {spec.datatype} and takes {what}"
        raise ProtocolError(f"Unable to parse 'data': {where}: {error}.") from None
    return array.reshape(shape)


def _from_binary(body: bytes, start: int, size: int, shape: tuple[int, ...], spec: TensorSpec) -> NDArray[Any]:
    """Return `size` bytes of the body, from `start` on, as a tensor."""
    count, dtype = math.prod(shape), DTYPES[spec.datatype]
    error = f"input '{spec.name}' is {spec.datatype} {_dims(shape)}, and"
    if not dtype.hasobject:
        if size != count * dtype.itemsize:
            raise ProtocolError(f"{error} needs {count * dtype.itemsize} bytes: 'binary_data_size' is {size}.")
        data = np.frombuffer(body, dtype, count, start)
        if spec.datatype == "BOOL" and data.view(np.uint8).max(initial=0) > 1:
            raise ProtocolError(f"{error} takes bytes of 0 and 1 only.")
        return data.reshape(shape)
    elements: list[bytes] = []
    end = start + size
    while len(elements) < count and start + 4 <= end:
        (length,) = struct.unpack_from("<I", body, start)
        elements.append(body[start + 4 : min(start + 4 + length, end)])
        start += 4 + length
    if len(elements) != count or start != end:
        raise ProtocolError(f"{error} its {size} bytes are not {count} elements, each with its length before it.")
    return _objects(elements, shape)


def _outputs(
    request: dict[str, Any], parameters: dict[str, Scalar], model: str, specs: Sequence[TensorSpec]
) -> tuple[RequestedOutput, ...]:
    datatypes = {spec.name: spec.datatype for spec in specs}
    asked: dict[str, RequestedOutput] = {}
    for entry in _entries(request, "outputs") or [{"name": name} for name in datatypes]:
        name = _name(entry, "output", model, specs, asked)
        own = _parameters(entry, f"output '{name}'")
        binary = own.get("binary_data", parameters.get("binary_data_output", False))
        classes = own.get("classification", 0)
        if not isinstance(binary, bool):
            raise ProtocolError("'binary_data' and 'binary_data_output' must be true or false.")
        if type(classes) is not int or classes < 0:
            raise ProtocolError(f"'classification' of output '{name}' must be a number of classes, or 0 for none.")
        if classes and not datatypes[name].startswith("FP"):
            raise ProtocolError(f"class result not available for output due to unsupported type '{datatypes[name]}'")
        asked[name] = RequestedOutput(name=name, binary=binary, classification=classes)
    return tuple(asked.values())


def _entries(request: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = request.get(key)
    if entries is None:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ProtocolError(f"'{key}' must be a list of objects.")
    return entries


def _name(
    entry: dict[str, Any], what: str, model: str, specs: Sequence[TensorSpec], earlier: Mapping[str, object]
) -> str:
    name = entry.get("name")
    if not isinstance(name, str):
        raise ProtocolError(f"every {what} must have a 'name', a string.")
    if name not in {spec.name for spec in specs}:
        raise ProtocolError(f"unexpected inference {what} '{_short(name)}' for model '{model}'")
    if name in earlier:
        raise ProtocolError(f"{what} '{name}' is there twice.")
    return name


def _parameters(entry: dict[str, Any], where: str) -> dict[str, Scalar]:
    found = entry.get("parameters")
    parameters = {} if found is None else found
    # 64 bits bound the whole numbers, and keep out 1e999, which JSON reads as infinity.
    if not isinstance(parameters, dict) or not all(
        isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 2**63)
        for value in parameters.values()
    ):
        raise ProtocolError(f"'parameters' of {where} must be an object of strings, numbers, true and false.")
    if "shared_memory_region" in parameters:
        raise ProtocolError(f"shared memory is not supported: {where} must travel in the body.")
    return parameters


def _objects(elements: list[bytes], shape: tuple[int, ...]) -> NDArray[Any]:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(shape)


def _dims(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "..."


def _best(logits: NDArray[Any], asked: RequestedOutput, labels: Sequence[str]) -> NDArray[Any]:
    """Return the best classes of logits (N, C), written as Triton does."""
    if not np.isfinite(logits).all():
        error = f"output '{asked.name}' holds NaN or infinity, which cannot be ranked: ask for binary_data without"
        raise ProtocolError(f"{error} classification, or run dsimg verify.", status=500)
    ids = top_k(logits, asked.classification)
    lines = [
        ":".join((f"{row[k]:f}", str(k), *labels[k : k + 1])).encode("utf-8", "replace")
        for row, best in zip(logits, ids, strict=True)
        for k in best
    ]
    return _objects(lines, ids.shape)


def _json_data(data: NDArray[Any], name: str) -> list[Any]:
    if data.dtype.hasobject:
        try:
            return [element.decode("utf-8") for element in data.flat]
        except UnicodeDecodeError:
            raise ProtocolError(f"output '{name}' is not text: ask for binary_data.", status=500) from None
    if not np.isfinite(data).all():
        error = (
            f"output '{name}' holds NaN or infinity, which JSON cannot hold: ask for binary_data, or run dsimg verify."
        )
        raise ProtocolError(error, status=500)
    return list(data.ravel().tolist())


def _packed(data: NDArray[Any]) -> bytes:
    return b"".join(part for element in data.flat for part in (struct.pack("<I", len(element)), element))
