import base64
import gzip
import json
import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from dsimg_export.server.protocol import (
    DTYPES,
    ProtocolError,
    RequestedOutput,
    TensorSpec,
    answer_infer,
    decompress,
    error_body,
    metadata,
    parse_infer,
    server_metadata,
)

HEADER = "Inference-Header-Content-Length"
IMAGES = TensorSpec(name="x", datatype="FP32", shape=(-1, 3, 2, 2))
FILES = TensorSpec(name="x", datatype="BYTES", shape=(-1,))
LOGITS = TensorSpec(name="logits", datatype="FP32", shape=(-1, 5))
PIXELS = np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2) / 7
LABELS = ("a", "b", "c", "d", "e:f")
EXTREMES = {  # of every datatype, what JSON and bytes must both bring through
    "BOOL": [[True, False], [False, True]],
    **{f"UINT{8 * n}": [[0, 1], [2 ** (8 * n) - 1, 7]] for n in (1, 2, 4, 8)},
    **{f"INT{8 * n}": [[-(2 ** (8 * n - 1)), 0], [2 ** (8 * n - 1) - 1, -1]] for n in (1, 2, 4, 8)},
    "FP16": [[65504.0, -0.0], [6e-8, 1 / 3]],
    "FP32": [[3.4028235e38, -0.0], [1e-45, 1 / 3]],
    "FP64": [[1.7976931348623157e308, -0.0], [5e-324, 1 / 3]],
}


def one(**edits):
    """Return a request of one image in JSON, changed."""
    return {"inputs": [entry()], **edits}


def entry(**edits):
    return {"name": "x", "datatype": "FP32", "shape": [1, 3, 2, 2], "data": [0.5] * 12, **edits}


def binary_entry(size=48, **edits):
    changed = entry(parameters={"binary_data_size": size}, **edits)
    del changed["data"]
    return changed


def pack(request, *tensors):
    """Return the body and the header of a binary request."""
    head = request if isinstance(request, bytes) else json.dumps(request).encode()
    return head + b"".join(tensors), str(len(head))


def parse(request, header_length=None, *, inputs=(IMAGES, FILES), outputs=(LOGITS,), max_batch=4):
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    return parse_infer(
        body, header_length=header_length, model="m", inputs=inputs, outputs=outputs, max_batch=max_batch
    )


def refusal(request, header_length=None, **options):
    with pytest.raises(ProtocolError) as caught:
        parse(request, header_length, **options)
    assert caught.value.status == 400
    return str(caught.value)


def read_answer(body, headers):
    """Return the JSON of an answer and its binary tensors by name, read as the protocol's page has it."""
    length = int(headers.get(HEADER, len(body)))
    answer = json.loads(body[:length])
    tensors = {}
    for output in answer["outputs"]:
        if "parameters" in output:
            size = output["parameters"]["binary_data_size"]
            tensors[output["name"]] = body[length : length + size]
            length += size
    assert length == len(body)
    return answer, tensors


def framed(*elements):
    return b"".join(struct.pack("<I", len(element)) + element for element in elements)


# Requests that are answered


@pytest.mark.parametrize("datatype", EXTREMES)
@pytest.mark.parametrize("binary", [False, True])
def test_every_datatype_goes_there_and_back(datatype, binary):
    values = np.array(EXTREMES[datatype], DTYPES[datatype])
    spec = TensorSpec(name="x", datatype=datatype, shape=(-1, 2))
    tensor = {"name": "x", "datatype": datatype, "shape": [2, 2]}
    if binary:
        tensor["parameters"] = {"binary_data_size": values.nbytes}
    else:
        tensor["data"] = EXTREMES[datatype]
    body, header_length = pack(
        {"inputs": [tensor], "parameters": {"binary_data_output": binary}}, values.tobytes() if binary else b""
    )
    request = parse(body, header_length, inputs=[spec], outputs=[spec])
    (found,) = request.inputs
    assert (found.name, found.datatype, found.data.dtype) == ("x", datatype, values.dtype)
    assert found.data.shape == (2, 2)
    assert found.data.tobytes() == values.tobytes()
    answer, tensors = read_answer(*answer_infer(request, {"x": found.data}, model="m", version="1", labels=()))
    (output,) = answer["outputs"]
    assert (output["datatype"], output["shape"]) == (datatype, [2, 2])
    data = np.frombuffer(tensors["x"], values.dtype) if binary else np.array(output["data"], values.dtype)
    assert data.tobytes() == values.tobytes()


def test_the_datatypes_are_those_of_the_protocol():
    assert [*DTYPES] == [*EXTREMES, "BYTES"]


@pytest.mark.parametrize("binary", [False, True])
def test_bytes_go_there_as_base64_or_with_their_lengths(binary):
    files = [b"\xff\xd8\0jpeg\0", b"", b"abc"]
    tensor = {"name": "x", "datatype": "BYTES", "shape": [3]}
    if binary:
        tensor["parameters"] = {"binary_data_size": len(framed(*files))}
    else:
        tensor["data"] = [base64.b64encode(file).decode() for file in files]
    body, header_length = pack({"inputs": [tensor]}, framed(*files) if binary else b"")
    (found,) = parse(body, header_length).inputs
    assert (found.datatype, found.data.shape, found.data.tolist()) == ("BYTES", (3,), files)


@pytest.mark.parametrize("binary", [False, True])
def test_bytes_come_back_as_text_or_with_their_lengths(binary):
    spec = TensorSpec(name="words", datatype="BYTES", shape=(-1, 2))
    request = parse(one(parameters={"binary_data_output": binary}), outputs=[spec])
    words = np.array([["é".encode(), b"b\0"]], dtype=object)
    answer, tensors = read_answer(*answer_infer(request, {"words": words}, model="m", version="1", labels=()))
    assert (answer["outputs"][0]["datatype"], answer["outputs"][0]["shape"]) == ("BYTES", [1, 2])
    if binary:
        assert tensors["words"] == framed("é".encode(), b"b\0")
    else:
        assert answer["outputs"][0]["data"] == ["é", "b\0"]
        with pytest.raises(ProtocolError, match=r"^output 'words' is not text: ask for binary_data\.$") as caught:
            answer_infer(
                request, {"words": np.array([[b"\xff", b""]], dtype=object)}, model="m", version="1", labels=()
            )
        assert caught.value.status == 500


@pytest.mark.parametrize("padding", range(4))
def test_binary_data_are_not_copied(padding):
    head = json.dumps({"inputs": [binary_entry(96, shape=[2, 3, 2, 2])]}).encode() + b" " * padding
    body, header_length = pack(head, PIXELS.tobytes())
    (found,) = parse(body, header_length).inputs
    assert np.shares_memory(found.data, np.frombuffer(body, np.uint8))
    assert not found.data.flags.writeable
    np.testing.assert_array_equal(found.data, PIXELS)


def test_binary_nan_passes_through_both_ways():
    bits = np.array([0x7FC00001, 0x7F800000, 0xFF800000, 0x7FA00000, 1], "<u4").view("<f4")
    spec = TensorSpec(name="x", datatype="FP32", shape=(-1, 5))
    body, header_length = pack({"inputs": [binary_entry(20, shape=[1, 5])]}, bits.tobytes())
    (found,) = parse(body, header_length, inputs=[spec]).inputs
    assert found.data.tobytes() == bits.tobytes()
    request = parse(one(parameters={"binary_data_output": True}))
    _, tensors = read_answer(*answer_infer(request, {"logits": found.data}, model="m", version="1", labels=()))
    assert tensors["logits"] == bits.tobytes()


@pytest.mark.parametrize("data", [PIXELS.tolist(), PIXELS.ravel().tolist()], ids=["nested", "flat"])
def test_json_data_are_flat_or_nested(data):
    (found,) = parse(one(inputs=[entry(shape=[2, 3, 2, 2], data=data)])).inputs
    assert found.data.dtype == np.float32
    np.testing.assert_array_equal(found.data, PIXELS)


def test_whole_numbers_are_floats_too():
    (found,) = parse(one(inputs=[entry(data=[1] * 6 + [2.5] * 6)])).inputs
    assert found.data.ravel().tolist() == [1.0] * 6 + [2.5] * 6


def test_json_and_binary_inputs_are_read_in_their_order():
    specs = [
        TensorSpec(name="a", datatype="UINT8", shape=(-1, 2)),
        TensorSpec(name="b", datatype="INT16", shape=(-1, 1)),
        TensorSpec(name="c", datatype="BYTES", shape=(-1,)),
    ]
    request = {
        "inputs": [
            {"name": "c", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 11}},
            {"name": "b", "datatype": "INT16", "shape": [2, 1], "data": [-3, 4]},
            {"name": "a", "datatype": "UINT8", "shape": [2, 2], "parameters": {"binary_data_size": 4}},
        ]
    }
    found = parse(*pack(request, framed(b"xyz", b""), bytes([1, 2, 3, 4])), inputs=specs).inputs
    assert [(tensor.name, tensor.data.tolist()) for tensor in found] == [
        ("c", [b"xyz", b""]),
        ("b", [[-3], [4]]),
        ("a", [[1, 2], [3, 4]]),
    ]


def test_what_is_optional_may_be_absent_or_null():
    for request in (
        one(),
        one(id=None, parameters=None, outputs=None, inputs=[entry(parameters=None)]),
        one(outputs=[], model_name="m", anything={"else": 1}),
    ):
        found = parse(request)
        assert (found.id, found.parameters) == ("", {})
        assert found.outputs == (RequestedOutput(name="logits", binary=False, classification=0),)


def test_id_and_parameters_are_kept():
    parameters = {"timeout": 5000, "priority": 0.5, "note": "é", "flag": True}
    found = parse(one(id="42", parameters=parameters))
    assert (found.id, found.parameters) == ("42", parameters)


@pytest.mark.parametrize(
    ("every", "own", "binary"),
    [(None, None, False), (True, None, True), (True, False, False), (False, True, True), (None, True, True)],
)
def test_an_output_says_itself_whether_it_is_binary(every, own, binary):
    parameters = {} if every is None else {"binary_data_output": every}
    output = {"name": "logits", "parameters": {"classification": 3} | ({} if own is None else {"binary_data": own})}
    found = parse(one(parameters=parameters, outputs=[output]))
    assert found.outputs == (RequestedOutput(name="logits", binary=binary, classification=3),)


def test_outputs_are_those_asked_for_in_that_order():
    specs = [TensorSpec(name=name, datatype="FP32", shape=(-1, 5)) for name in "abc"]
    assert [asked.name for asked in parse(one(), outputs=specs).outputs] == ["a", "b", "c"]
    asked = parse(one(outputs=[{"name": "c"}, {"name": "a"}]), outputs=specs).outputs
    assert [one.name for one in asked] == ["c", "a"]


@pytest.mark.parametrize(
    ("body", "inputs", "datatype"),
    [
        (bytes(48), (IMAGES, FILES), "FP32"),
        (bytes(47), (IMAGES, FILES), "BYTES"),
        (bytes(48), (FILES, IMAGES), "BYTES"),
        (b"{}", (FILES,), "BYTES"),
    ],
    ids=["tensor", "file", "file first", "file alone"],
)
def test_a_body_without_json_is_the_only_input(body, inputs, datatype):
    request = parse(body, "0", inputs=inputs)
    (found,) = request.inputs
    assert (found.name, found.datatype) == ("x", datatype)
    assert found.data.shape == ((1,) if datatype == "BYTES" else (1, 3, 2, 2))
    assert (found.data[0] if datatype == "BYTES" else found.data.tobytes()) == body
    assert (request.id, request.parameters) == ("", {})
    assert request.outputs == (RequestedOutput(name="logits", binary=True, classification=0),)


def test_a_body_without_json_must_be_one_image():
    assert refusal(bytes(47), "0", inputs=[IMAGES]) == (
        f"{HEADER} is 0, but the body's 47 bytes are not FP32 [1,3,2,2], for model 'm'."
    )
    variable = TensorSpec(name="x", datatype="UINT8", shape=(-1, -1))
    assert refusal(b"12", "0", inputs=[variable]).endswith("the body's 2 bytes are not UINT8 [1,-1], for model 'm'.")
    two = [IMAGES, TensorSpec(name="y", datatype="BYTES", shape=(-1,))]
    assert refusal(bytes(48), "0", inputs=two) == f"{HEADER} cannot be 0: model 'm' has several inputs."


# Requests that are refused


PARSE = "failed to parse the request JSON buffer: "
DATA = "Unable to parse 'data': "
SHAPE = (
    DATA
    + "Shape does not match true shape of 'data' field: input 'x' is [1,3,2,2], nested so or one list of 12 values."
)
FLOATS = DATA + "input 'x' is FP32 and takes finite numbers: "
GIVEN = "input 'x' must have either 'data' or the parameter 'binary_data_size'."
DIMS = "'shape' of input 'x' must be a list of whole numbers from 0 on."
SCALARS = "'parameters' of {} must be an object of strings, numbers, true and false."
MISSING = "expected 1 inputs but got 0 inputs for model 'm'. Got inputs [], but missing required inputs ['x']."


def unexpected_shape(got):
    return (
        f"unexpected shape for input 'x' for model 'm'. Expected [-1,3,2,2], got {got}. "
        "The first dimension is the batch."
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", PARSE + "Expecting value: line 1 column 1 (char 0)."),
        (b"{", PARSE + "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)."),
        (b'{"id": "\xff"}', PARSE + "'utf-8' codec can't decode byte 0xff in position 8: invalid start byte."),
        ('{"id": "1"}'.encode("utf-16"), PARSE + "'utf-8' codec can't decode byte 0xff in position 0: invalid start "),
        (b"[" * 60_000, PARSE + "it is nested too deeply."),
        (
            b'{"inputs": [' + b"1" * 5000 + b"]}",
            PARSE + "Exceeds the limit (4300 digits) for integer string conversion",
        ),
        (b'{"id": NaN}', PARSE + "NaN is not JSON, send such values as binary data."),
        (b'{"inputs": [{"data": [-Infinity]}]}', PARSE + "-Infinity is not JSON, send such values as binary data."),
        (b"[]", "the request must be a JSON object."),
        (b"{}", MISSING),
    ],
)
def test_a_body_that_is_no_request_is_refused(body, message):
    assert refusal(body).startswith(message)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (one(id=1), "'id' must be a string."),
        (one(inputs=[]), MISSING),
        (one(inputs=None), MISSING),
        (one(inputs={"x": 1}), "'inputs' must be a list of objects."),
        (one(inputs=["x"]), "'inputs' must be a list of objects."),
        (one(inputs=[entry(), entry()]), "input 'x' is there twice."),
        (one(inputs=[entry(name="y" * 200)]), f"unexpected inference input '{'y' * 100}...' for model 'm'"),
        (one(inputs=[entry(name=["x"])]), "every input must have a 'name', a string."),
        (one(inputs=[{}]), "every input must have a 'name', a string."),
        (one(parameters=[]), SCALARS.format("the request")),
        (one(parameters={"a": None}), SCALARS.format("the request")),
        (one(parameters={"a": {}}), SCALARS.format("the request")),
        (one(parameters={"a": 2**63}), SCALARS.format("the request")),
        (one(inputs=[entry(parameters={"a": []})]), SCALARS.format("input 'x'")),
        (one(outputs=[{"name": "logits", "parameters": 1}]), SCALARS.format("output 'logits'")),
        (one(outputs={}), "'outputs' must be a list of objects."),
        (one(outputs=["logits"]), "'outputs' must be a list of objects."),
        (one(outputs=[{"name": "y"}]), "unexpected inference output 'y' for model 'm'"),
        (one(outputs=[{"name": "logits"}] * 2), "output 'logits' is there twice."),
        (one(outputs=[{}]), "every output must have a 'name', a string."),
        (
            one(inputs=[entry(parameters={"shared_memory_region": "r", "shared_memory_byte_size": 48})]),
            "shared memory is not supported: input 'x' must travel in the body.",
        ),
        (
            one(outputs=[{"name": "logits", "parameters": {"shared_memory_region": "r"}}]),
            "shared memory is not supported: output 'logits' must travel in the body.",
        ),
        (one(parameters={"binary_data_output": 1}), "'binary_data' and 'binary_data_output' must be true or false."),
        (
            one(outputs=[{"name": "logits", "parameters": {"binary_data": "yes"}}]),
            "'binary_data' and 'binary_data_output' must be true or false.",
        ),
        *(
            (
                one(outputs=[{"name": "logits", "parameters": {"classification": count}}]),
                "'classification' of output 'logits' must be a number of classes, or 0 for none.",
            )
            for count in (-1, True, 1.0, "3")
        ),
    ],
)
def test_a_request_that_does_not_fit_is_refused(request_, message):
    assert refusal(request_) == message


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"datatype": "FP64"}, "inference input 'x' data-type is 'FP64', but model 'm' expects 'FP32' or 'BYTES'"),
        (
            {"datatype": "BF16"},
            "inference input 'x' data-type is 'BF16', which is not supported, but model 'm' expects 'FP32' or 'BYTES'",
        ),
        (
            {"datatype": "fp32"},
            "inference input 'x' data-type is 'fp32', which is not supported, but model 'm' expects 'FP32' or 'BYTES'",
        ),
        ({"datatype": 1}, "'datatype' of input 'x' must be a string."),
        ({"datatype": None}, "'datatype' of input 'x' must be a string."),
        ({"shape": None}, DIMS),
        ({"shape": "1"}, DIMS),
        ({"shape": [True, 3, 2, 2]}, DIMS),
        ({"shape": [1.0, 3, 2, 2]}, DIMS),
        ({"shape": [-1, 3, 2, 2]}, DIMS),
        ({"shape": [2**63, 3, 2, 2]}, DIMS),
        ({"shape": [3, 2, 2]}, unexpected_shape("[3,2,2]")),
        ({"shape": [1, 2, 2, 3]}, unexpected_shape("[1,2,2,3]")),
        ({"shape": []}, unexpected_shape("[]")),
        ({"shape": [1] * 9999}, unexpected_shape("[" + "1," * 49 + "1...")),
        ({"shape": [0, 3, 2, 2], "data": []}, "inference request batch-size must be >= 1 for 'm'"),
        ({"shape": [5, 3, 2, 2]}, "inference request batch-size must be <= 4 for 'm'"),
        ({"data": None}, GIVEN),
        ({"parameters": {"binary_data_size": 48}}, GIVEN),
        ({"data": 1.0}, SHAPE),
        ({"data": {"0": 1.0}}, SHAPE),
        ({"data": []}, SHAPE),
        ({"data": [1.0] * 11}, SHAPE),
        ({"data": [1.0] * 13}, SHAPE),
        ({"data": np.zeros((1, 2, 2, 3)).tolist()}, SHAPE),
        ({"data": np.zeros((3, 2, 2)).tolist()}, SHAPE),
        ({"data": np.zeros((2, 6)).tolist()}, SHAPE),
        ({"data": [[1.0] * 6, [1.0] * 5]}, SHAPE),
        ({"data": [[[[1.0, 2.0], [3.0, 4.0]]] * 2 + [[[1.0, 2.0], [3.0]]]]}, SHAPE),
        ({"data": [1.0] * 11 + [[2.0]]}, FLOATS + "another type was found."),
        ({"data": np.zeros((1, 3, 2, 2, 1)).tolist()}, FLOATS + "another type was found."),
        ({"data": [1.0] * 11 + ["2"]}, FLOATS + "another type was found."),
        ({"data": [1.0] * 11 + [None]}, FLOATS + "another type was found."),
        ({"data": [True] * 12}, FLOATS + "another type was found."),
        ({"data": [1.0] * 11 + [1e39]}, FLOATS + "a number is too large."),
        ({"data": [1.0] * 11 + [10**400]}, FLOATS + "int too large to convert to float."),
    ],
)
def test_an_input_that_does_not_fit_is_refused(edits, message):
    assert refusal(one(inputs=[entry(**edits)])) == message


def test_a_number_too_large_for_any_float_is_refused():
    body = json.dumps(one(inputs=[entry(data=[0] * 11 + [7])])).replace("7]", "1e999]").encode()
    assert refusal(body) == FLOATS + "a number is too large."
    body = json.dumps(one(parameters={"timeout": 7})).replace("7}", "1e999}").encode()
    assert refusal(body) == SCALARS.format("the request")


@pytest.mark.parametrize(
    ("datatype", "value", "message"),
    [
        ("BOOL", 1, "BOOL and takes true or false: another type was found."),
        ("UINT8", 256, "UINT8 and takes whole numbers: Python integer 256 out of bounds for uint8."),
        ("UINT8", -1, "UINT8 and takes whole numbers: Python integer -1 out of bounds for uint8."),
        ("INT16", 2**15, "INT16 and takes whole numbers: Python integer 32768 out of bounds for int16."),
        ("UINT64", 2**64, "UINT64 and takes whole numbers: Python int too large to convert to C long."),
        ("INT64", 2**63, "INT64 and takes whole numbers: Python int too large to convert to C long."),
        ("INT32", 1.0, "INT32 and takes whole numbers: another type was found."),
        ("INT32", True, "INT32 and takes whole numbers: another type was found."),
        ("FP16", 70000, "FP16 and takes finite numbers: a number is too large."),
        ("BYTES", 1, "BYTES and takes plain base64: another type was found."),
        ("BYTES", "abc", "BYTES and takes plain base64: Incorrect padding."),
        ("BYTES", "YWJj\n", "BYTES and takes plain base64: Only base64 data is allowed."),
        ("BYTES", "é", "BYTES and takes plain base64: string argument should contain only ASCII characters."),
    ],
)
def test_a_value_that_its_datatype_cannot_hold_is_refused(datatype, value, message):
    spec = TensorSpec(name="x", datatype=datatype, shape=(-1,))
    request = one(inputs=[entry(datatype=datatype, shape=[1], data=[value])])
    assert refusal(request, inputs=[spec]) == DATA + "input 'x' is " + message


@pytest.mark.parametrize("header", ["-1", "+1", "1.0", "", " 1", "١", "9" * 30])
def test_a_header_that_is_no_length_is_refused(header):
    assert refusal(one(), header) == f"{HEADER} must be the number of bytes of JSON, not '{header}'."


def test_binary_data_must_be_the_rest_of_the_body():
    request = {"inputs": [binary_entry()]}
    body, header_length = pack(request, bytes(48))
    assert len(parse(body, header_length).inputs[0].data) == 1
    assert refusal(body + b"12", header_length) == "unexpected additional input data for model 'm': 2 bytes."
    short = "unexpected size for input 'x', expecting {} additional bytes for model 'm'. " + HEADER
    assert refusal(body[:-3], header_length).startswith(short.format(3))
    assert refusal(json.dumps(request).encode()).startswith(short.format(48))
    assert refusal(body, str(len(body) + 1)) == f"{HEADER} is {len(body) + 1}, but the body has {len(body)} bytes."
    assert refusal(body).startswith(PARSE)
    assert refusal(json.dumps(one()).encode() + bytes(4), str(len(json.dumps(one())))) == (
        "unexpected additional input data for model 'm': 4 bytes."
    )


@pytest.mark.parametrize("size", [-1, True, 48.0, "48"])
def test_a_size_that_is_no_number_of_bytes_is_refused(size):
    body, header_length = pack({"inputs": [binary_entry(size)]}, bytes(48))
    assert refusal(body, header_length) == "'binary_data_size' of input 'x' must be a number of bytes."


def test_sizes_are_checked_before_memory_is_taken():
    spec = TensorSpec(name="x", datatype="FP64", shape=(-1, -1, -1))
    huge = 2**63 - 1
    body, header_length = pack(
        {"inputs": [binary_entry(16, datatype="FP64", shape=[2, huge, huge], name="x")]}, bytes(16)
    )
    assert refusal(body, header_length, inputs=[spec]) == (
        f"input 'x' is FP64 [2,{huge},{huge}], and needs {16 * huge * huge} bytes: 'binary_data_size' is 16."
    )
    # In 64 bits these would be 0 elements.
    request = one(inputs=[entry(datatype="FP64", shape=[4, 2**31, 2**31], data=[])])
    assert refusal(request, inputs=[spec]).endswith(f"one list of {2**64} values.")
    spec = TensorSpec(name="x", datatype="BYTES", shape=(-1, -1))
    body, header_length = pack({"inputs": [binary_entry(8, datatype="BYTES", shape=[1, huge])]}, bytes(8))
    assert "its 8 bytes are not" in refusal(body, header_length, inputs=[spec])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        framed(b"abc"),
        framed(b"a", b"b", b"c"),
        framed(b"a", b"b") + b"\0",
        framed(b"a") + b"\2\0\0\0b",
        framed(b"a") + b"\xff\xff\xff\xff",
        framed(b"abcd")[:-1],
    ],
)
def test_elements_that_their_lengths_do_not_fit_are_refused(data):
    body, header_length = pack({"inputs": [binary_entry(len(data), datatype="BYTES", shape=[2])]}, data)
    assert refusal(body, header_length) == (
        f"input 'x' is BYTES [2], and its {len(data)} bytes are not 2 elements, each with its length before it."
    )


def test_the_bytes_of_one_tensor_are_not_read_as_another():
    specs = [TensorSpec(name=name, datatype="BYTES", shape=(-1,)) for name in "xy"]
    data = framed(b"ab", b"cd")  # the first claims a byte of the second
    inputs = [binary_entry(size, name=name, datatype="BYTES", shape=[1]) for name, size in (("x", 5), ("y", 7))]
    assert "its 5 bytes are not 1 elements" in refusal(*pack({"inputs": inputs}, data), inputs=specs)


def test_binary_bools_are_0_or_1():
    spec = TensorSpec(name="x", datatype="BOOL", shape=(-1,))
    body, header_length = pack({"inputs": [binary_entry(2, datatype="BOOL", shape=[2])]}, b"\1\2")
    assert refusal(body, header_length, inputs=[spec]) == "input 'x' is BOOL [2], and takes bytes of 0 and 1 only."


def test_all_inputs_are_there_and_of_one_batch_size():
    specs = [TensorSpec(name=name, datatype="UINT8", shape=(-1, 1)) for name in "xyz"]

    def inputs(**batches):
        return one(
            inputs=[entry(name=name, datatype="UINT8", shape=[n, 1], data=[0] * n) for name, n in batches.items()]
        )

    assert len(parse(inputs(z=2, x=2, y=2), inputs=specs).inputs) == 3
    assert refusal(inputs(z=2, x=2), inputs=specs) == (
        "expected 3 inputs but got 2 inputs for model 'm'. Got inputs ['z', 'x'], but missing required inputs ['y']."
    )
    assert refusal(inputs(x=2, y=1), inputs=specs) == "input 'y' batch size does not match other inputs for 'm'"


def test_classes_are_of_logits_only():
    spec = TensorSpec(name="logits", datatype="INT32", shape=(-1, 5))
    request = one(outputs=[{"name": "logits", "parameters": {"classification": 1}}])
    assert refusal(request, outputs=[spec]) == "class result not available for output due to unsupported type 'INT32'"


# Answers


def asking(*, binary=False, classification=0, **edits):
    parameters = {"binary_data": binary, "classification": classification}
    return parse(one(outputs=[{"name": "logits", "parameters": parameters}], **edits))


def test_an_answer_in_json():
    logits = np.array([[1, 0.5, -0.0, 3e-5, 1 / 3]], np.float32)
    body, headers = answer_infer(asking(id="é7"), {"logits": logits}, model="m", version="abc", labels=LABELS)
    assert headers == {"Content-Type": "application/json"}
    assert json.loads(body) == {
        "model_name": "m",
        "model_version": "abc",
        "id": "é7",
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [1, 5], "data": logits.ravel().tolist()}],
    }


def test_an_answer_in_binary():
    logits = np.arange(10, dtype=np.float32).reshape(5, 2).T  # not contiguous
    body, headers = answer_infer(
        asking(binary=True), {"logits": logits}, model="m", version="1", labels=(), parameters={"cached": False}
    )
    answer, tensors = read_answer(body, headers)
    assert headers == {"Content-Type": "application/octet-stream", HEADER: str(len(body) - 40)}
    assert answer == {
        "model_name": "m",
        "model_version": "1",
        "parameters": {"cached": False},
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [2, 5], "parameters": {"binary_data_size": 40}}],
    }
    np.testing.assert_array_equal(np.frombuffer(tensors["logits"], "<f4").reshape(2, 5), logits)


def test_json_and_binary_outputs_go_together():
    specs = [TensorSpec(name=name, datatype="UINT8", shape=(-1, 1)) for name in "abc"]
    wanted = [{"name": name, "parameters": {"binary_data": name != "b"}} for name in "cba"]
    request = parse(one(outputs=wanted), outputs=specs)
    arrays = {name: np.array([[number]], np.uint8) for number, name in enumerate("abc")}
    answer, tensors = read_answer(*answer_infer(request, arrays, model="m", version="1", labels=()))
    assert [output["name"] for output in answer["outputs"]] == ["c", "b", "a"]
    assert answer["outputs"][1]["data"] == [1]
    assert tensors == {"c": b"\2", "a": b"\0"}


@pytest.mark.parametrize("binary", [False, True])
def test_the_best_classes_are_written_as_triton_does(binary):
    logits = np.array([[0, 1, 2, 3, 4], [7, -0.5, 7, 1e-7, 7]], np.float32)
    request = asking(binary=binary, classification=3)
    answer, tensors = read_answer(*answer_infer(request, {"logits": logits}, model="m", version="1", labels=LABELS))
    output = answer["outputs"][0]
    lines = ["4.000000:4:e:f", "3.000000:3:d", "2.000000:2:c", "7.000000:0:a", "7.000000:2:c", "7.000000:4:e:f"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 3])
    if binary:
        assert tensors["logits"] == framed(*(line.encode() for line in lines))
    else:
        assert output["data"] == lines


def test_there_are_no_more_classes_than_logits_and_no_more_labels_than_given():
    logits = np.array([[0, 1, 2, 3, 4]], np.float32)
    body, _ = answer_infer(
        asking(classification=99), {"logits": logits}, model="m", version="1", labels=["é", "\ud800"]
    )
    output = json.loads(body)["outputs"][0]
    assert output["shape"] == [1, 5]
    assert output["data"] == ["4.000000:4", "3.000000:3", "2.000000:2", "1.000000:1:?", "0.000000:0:é"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_no_answer_in_json(value):
    logits = np.array([[0, 1, 2, 3, value]], np.float32)
    for request, message in (
        (asking(), "which JSON cannot hold: ask for binary_data, or run dsimg verify."),
        (
            asking(classification=2, binary=True),
            "which cannot be ranked: ask for binary_data without classification, or run dsimg verify.",
        ),
    ):
        with pytest.raises(ProtocolError) as caught:
            answer_infer(request, {"logits": logits}, model="m", version="1", labels=LABELS)
        assert str(caught.value) == f"output 'logits' holds NaN or infinity, {message}"
        assert caught.value.status == 500


def test_errors_and_metadata():
    assert json.loads(error_body('not "this"')) == {"error": 'not "this"'}
    assert server_metadata("1.2") == {
        "name": "dsimg",
        "version": "1.2",
        "extensions": [
            "binary_tensor_data",
            "classification",
            "model_configuration",
            "statistics",
            "model_repository",
        ],
    }
    found = metadata(
        "m", versions=["1"], platform="onnxruntime_onnx", inputs=[IMAGES], outputs=[LOGITS], properties={"a": "b"}
    )
    assert json.loads(json.dumps(found)) == {
        "name": "m",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3, 2, 2]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 5]}],
        "properties": {"a": "b"},
    }


# Compressed bodies


COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("name", COMPRESS)
def test_a_compressed_body_is_read_up_to_the_limit(name):
    data = bytes(range(250)) * 4
    assert decompress(COMPRESS[name](data), f" {name.upper()} ", limit=1000) == data
    assert decompress(COMPRESS[name](b""), name, limit=0) == b""
    with pytest.raises(ProtocolError, match=r"^the body is larger than 999 bytes\. Send fewer images") as caught:
        decompress(COMPRESS[name](data), name, limit=999)
    assert caught.value.status == 413


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_a_body_may_be_as_it_is(encoding):
    assert decompress(b"abc", encoding, limit=3) == b"abc"
    with pytest.raises(ProtocolError, match="larger than 2 bytes"):
        decompress(b"abc", encoding, limit=2)


@pytest.mark.parametrize("name", COMPRESS)
def test_a_bomb_takes_no_memory(name):
    bomb = COMPRESS[name](bytes(2**24))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="larger than 1000 bytes"):
        decompress(bomb, name, limit=1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**18  # of which the copy of what was not read


@pytest.mark.parametrize("name", COMPRESS)
def test_a_damaged_body_is_refused(name):
    good = COMPRESS[name](b"abc" * 9)
    for body in (b"", good[:-1], good + b"x", good + good):
        with pytest.raises(ProtocolError, match=rf"^the body is not one whole {name} stream\.$") as caught:
            decompress(body, name, limit=1000)
        assert caught.value.status == 400
    for body in (b"abc", good[:-6] + b"abcdef"):
        with pytest.raises(ProtocolError, match=rf"^the body is not {name}, or is damaged: Error -3 ") as caught:
            decompress(body, name, limit=1000)
        assert caught.value.status == 400


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, deflate"])
def test_another_encoding_is_refused(encoding):
    with pytest.raises(ProtocolError) as caught:
        decompress(b"", encoding, limit=10)
    assert caught.value.status == 415
    assert str(caught.value) == f"Content-Encoding '{encoding}' is not supported. Send gzip or deflate."


# Mutations


def mutated(body, rng):
    """Return a body with a few bytes changed, dropped, doubled, or swapped for what JSON gives a meaning."""
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0 and place < len(data):
            data[place] = rng.randrange(256)
        elif kind == 1:
            del data[place : place + rng.randint(1, 9)]
        elif kind == 2:
            data[place:place] = data[place : place + rng.randint(1, 30)]
        else:
            tokens = (
                b"[",
                b"]",
                b"{",
                b"}",
                b'"',
                b",",
                b"-",
                b"1e999",
                b"null",
                b"true",
                b"NaN",
                b"9" * 30,
                b"\\ud800",
            )
            data[place : place + rng.randrange(3)] = rng.choice(tokens)
    return bytes(data)


@pytest.mark.parametrize("binary", [False, True])
def test_whatever_is_sent_is_a_request_or_refused(binary):
    rng = random.Random(0)
    specs = [IMAGES, FILES, TensorSpec(name="y", datatype="UINT8", shape=(-1, 2))]
    output = {"name": "logits", "parameters": {"classification": 2, "binary_data": True}}
    if binary:
        inputs = [
            binary_entry(13, datatype="BYTES", shape=[2]),
            binary_entry(4, name="y", datatype="UINT8", shape=[2, 2]),
        ]
        tensors = framed(b"abcd", b"x"), bytes(4)
    else:
        inputs = [
            entry(datatype="BYTES", shape=[2], data=["YWJj", ""]),
            entry(name="y", datatype="UINT8", shape=[2, 2], data=[[1, 2], [3, 4]]),
        ]
        tensors = (b"",)
    request = {"id": "1", "parameters": {"timeout": 9}, "inputs": inputs, "outputs": [output]}
    head, tail = json.dumps(request).encode(), b"".join(tensors)
    assert parse(head + tail, str(len(head)), inputs=specs).id == "1"
    logits = np.zeros((2, 5), np.float32)
    good = 0
    messages = set()
    for _ in range(3000):
        changed = mutated(head, rng) if rng.random() < 0.8 else head
        body = changed + (mutated(tail, rng) if rng.random() < 0.5 else tail)
        length = len(changed) if rng.random() < 0.9 else rng.randrange(len(body) + 9)
        try:
            found = parse(body, str(length) if binary else None, inputs=specs)
        except ProtocolError as error:
            messages.add((error.status, str(error)))
            continue
        assert all(1 <= len(tensor.data) <= 4 for tensor in found.inputs)
        read_answer(*answer_infer(found, {"logits": logits}, model="m", version="1", labels=LABELS))
        good += 1
    assert good > 100  # small enough for some to be requests still
    assert {status for status, _ in messages} == {400}
    assert len(messages) > 100
    assert max(len(message) for _, message in messages) < 500
