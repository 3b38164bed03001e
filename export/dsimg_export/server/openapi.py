"""What the server's routes take and give, as an OpenAPI 3.1 document."""

from typing import Any

import dsimg

JsonObject = dict[str, Any]

ABOUT = (
    "Images in, labels out; and the Open Inference Protocol v2, which clients of Triton and KServe speak. Every error "
    'is {"error": "a sentence"}. A server started with --api_key_file wants one of its keys in each request, as '
    '"Authorization: Bearer KEY" or "X-API-Key: KEY".'
)

TAGS = {
    "images": "Image files in, labels out.",
    "server": "What is served, and how it does.",
    "protocol": "The Open Inference Protocol v2, with Triton's extensions: binary tensors, classification, model "
    "configuration, statistics, model repository. A model's version is the beginning of its run.json's hash.",
    "page": "For people.",
}

# A GIF of one pixel: the examples can be sent as they are.
PICTURE = "R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="

REFUSALS = {
    400: "The request is malformed; the error says where.",
    401: "A key is wanted.",
    404: "There is no such model, or no such version of it.",
    408: "The body came too slowly.",
    413: "The body is too large, or holds too many images.",
    415: "The Content-Encoding is neither gzip nor deflate.",
    429: "More requests were sent without waiting for an answer than may wait on a connection.",
    431: "The head is too large.",
    500: "The network gave NaN or infinity, which the answer asked for cannot hold.",
    503: "There is no room, or the answer would come too late.",
}
REFUSAL_HEADERS = {401: ("WWW-Authenticate",), 415: ("Accept-Encoding",), 503: ("Retry-After",)}
ALWAYS = (400, 429, 431, 503)  # any request may be damaged, too much, or one too many


def openapi(*, keys: bool = False) -> JsonObject:
    """Return the document. It has a path for each route of `app.build_app`, and no others. keys: if one is wanted."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "dsimg serve", "version": dsimg.__version__, "description": ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"header": []}, *([] if keys else [{}])],
        "tags": [{"name": name, "description": about} for name, about in TAGS.items()],
        "paths": {**_images(), **_server(), **_protocol(), **_pages()},
        "components": {
            "schemas": SCHEMAS,
            "parameters": PARAMETERS,
            "headers": HEADERS,
            "responses": {
                str(status): _json(about, "Error", headers=REFUSAL_HEADERS.get(status, ()))
                for status, about in REFUSALS.items()
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _images() -> JsonObject:
    form = {
        "type": "object",
        "description": "A field for each file, under any name.",
        "minProperties": 1,
        "additionalProperties": {"contentMediaType": "application/octet-stream"},
    }
    photo = {"class": "tabby", "index": 281, "probability": 0.93}
    said: JsonObject = {
        "parameters": ("top", "X-Request-Timeout", "Content-Encoding"),
        "body": {
            "required": True,
            "description": "One image as it is, a form of files, or JSON with base64. A body that is neither form nor "
            "JSON is one image, whatever its type says.",
            "content": {
                "application/octet-stream": {},
                "image/*": {},
                "multipart/form-data": {"schema": form},
                "application/json": {
                    "schema": _ref("Images"),
                    "example": {"images": [PICTURE, {"name": "b", "data": PICTURE}]},
                },
            },
        },
        "answers": {
            "200": _json(
                "The best classes of each image, in order; an image that cannot be read has an error instead.",
                "Prediction",
                headers=("Server-Timing",),
                example={"model": "r18", "version": "194d5ebd6119", "images": [{"index": 0, "classes": [photo]}]},
            ),
            "400": _json("No image could be read, or the request is malformed.", "NoPrediction"),
        },
    }
    first, named = "The best classes of each image, by the first model", "The same, by a model that is named"
    return {
        "/predict": {"post": _operation("images", "predict", first, refused=(408, 413, 415, 500), **said)},
        "/models/{name}/predict": {
            "post": _operation("images", "predict_by", named, path=("name",), refused=(404, 408, 413, 415, 500), **said)
        },
    }


def _server() -> JsonObject:
    text = {"text/plain": {"schema": TEXT}}
    return {
        "/models": _get("server", "models", "What is served, and the steps by which it was made", "Models"),
        "/metrics": _get("server", "metrics", "Metrics for Prometheus", content=text),
    }


def _protocol() -> JsonObject:
    late = {"503": _json("It does not take requests now, or has no room for this one.", "Health", "Error")}
    index = _operation(
        "protocol",
        "repository_index",
        "The models and their states",
        body={
            "description": "ready: leave out what does not take requests.",
            "content": {"application/json": {"schema": _object("ready", ready=YES)}},
        },
        answers={"200": _json("The models.", "RepositoryIndex")},
        refused=(408, 413),
    )
    paths = {
        "/v2": _get("protocol", "server_metadata", "The server's name, version and extensions", "ServerMetadata"),
        "/v2/": _get("protocol", "server_metadata_slash", "The same", "ServerMetadata"),
        "/v2/health/live": _get("protocol", "live", "Whether the server lives", "Health", key=False),
        "/v2/health/ready": _get("protocol", "ready", "Whether it takes requests", "Health", answers=late, key=False),
        "/v2/models/stats": _get(
            "protocol", "statistics", "What every model has done since it was loaded", "Statistics"
        ),
        "/v2/repository/index": {"post": index},
    }
    late = {"503": _json("It does not take requests now, or has no room for this one.", "ModelReady", "Error")}
    for place, names, suffix in (
        ("/v2/models/{name}", ("name",), ""),
        ("/v2/models/{name}/versions/{version}", ("name", "version"), "_of_version"),
    ):
        of: JsonObject = {"path": names, "refused": (404,)}
        paths |= {
            place: _get("protocol", f"model{suffix}", "A model's inputs and outputs", "ModelMetadata", **of),
            f"{place}/ready": _get(
                "protocol", f"model_ready{suffix}", "Whether a model takes requests", "ModelReady", answers=late, **of
            ),
            f"{place}/config": _get(
                "protocol", f"model_config{suffix}", "A model's configuration, in Triton's words", "ModelConfig", **of
            ),
            f"{place}/stats": _get(
                "protocol", f"model_statistics{suffix}", "What a model has done since it was loaded", "Statistics", **of
            ),
            f"{place}/infer": {"post": _infer(f"infer{suffix}", names)},
        }
    return paths


def _infer(name: str, path: tuple[str, ...]) -> JsonObject:
    binary = "JSON, then the tensors' bytes, in order; Inference-Header-Content-Length says where they begin."
    asked = {"inputs": [{"name": "images", "datatype": "BYTES", "shape": [1], "data": [PICTURE]}]}
    best = {"name": "logits", "parameters": {"classification": 5}}
    return _operation(
        "protocol",
        name,
        "The network's answer to its own input, or to image files as BYTES",
        path=path,
        parameters=("X-Request-Timeout", "Inference-Header-Content-Length", "Content-Encoding"),
        body={
            "required": True,
            "description": f"JSON, its whole numbers without a fraction (5, not 5.0). Or {binary} Where it says 0, the "
            "body is the one input's bytes.",
            "content": {
                "application/json": {"schema": _ref("InferRequest"), "example": {**asked, "outputs": [best]}},
                "application/octet-stream": {},
            },
        },
        answers={
            "200": _answer(
                f"The outputs that were asked for, as JSON, or where binary data were asked for: {binary}",
                {"application/json": {"schema": _ref("InferResponse")}, "application/octet-stream": {}},
                headers=("Server-Timing", "Inference-Header-Content-Length"),
            )
        },
        refused=(404, 408, 413, 415, 500),
    )


def _pages() -> JsonObject:
    return {
        "/": _get("page", "page", "The page to try pictures on", content={"text/html": {}}, key=False),
        "/page.css": _get("page", "page_css", "Its style", content={"text/css": {}}, key=False),
        "/page.js": _get("page", "page_js", "Its script", content={"text/javascript": {}}, key=False),
        "/docs": _get("page", "docs", "This document as a page", content={"text/html": {}}, key=False),
        "/openapi.json": _get("page", "openapi", "This document", content={"application/json": {}}, key=False),
    }


# Parts of it


def _operation(
    tag: str,
    name: str,
    summary: str,
    *,
    answers: JsonObject,
    path: tuple[str, ...] = (),
    parameters: tuple[str, ...] = (),
    body: JsonObject | None = None,
    refused: tuple[int, ...] = (),
    key: bool = True,
) -> JsonObject:
    """Return an operation. path: the names in it. refused: the statuses that not all have. key: if one is wanted."""
    refusals = {
        str(status): {"$ref": f"#/components/responses/{status}"}
        for status in (*ALWAYS, *([401] if key else []), *refused)
    }
    return {
        "operationId": name,
        "tags": [tag],
        "summary": summary if key else f"{summary}; no key is wanted",
        "parameters": [{"$ref": f"#/components/parameters/{one}"} for one in (*path, *parameters, "X-Request-Id")],
        **({"requestBody": body} if body else {}),
        "responses": dict(sorted({**refusals, **answers}.items())),
        **({} if key else {"security": []}),
    }


def _get(
    tag: str,
    name: str,
    summary: str,
    schema: str = "",
    *,
    content: JsonObject | None = None,
    answers: JsonObject | None = None,
    **rest: Any,
) -> JsonObject:
    """Return a path that is read; schema: of its JSON, or content: what it holds instead."""
    good = _answer(f"{summary}.", content) if content else _json(f"{summary}.", schema)
    return {"get": _operation(tag, name, summary, answers={"200": good, **(answers or {})}, **rest)}


def _answer(about: str, content: JsonObject, *, headers: tuple[str, ...] = ()) -> JsonObject:
    named = {name: {"$ref": f"#/components/headers/{name}"} for name in ("X-Request-Id", *headers)}
    return {"description": about, "headers": named, "content": content}


def _json(about: str, *schemas: str, headers: tuple[str, ...] = (), example: object = None) -> JsonObject:
    """Return an answer in JSON, of any of these schemas."""
    schema = _ref(schemas[0]) if len(schemas) == 1 else {"anyOf": [_ref(name) for name in schemas]}
    content = {"schema": schema, **({"example": example} if example is not None else {})}
    return _answer(about, {"application/json": content}, headers=headers)


def _ref(schema: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{schema}"}


def _object(*optional: str, **properties: object) -> JsonObject:
    """Return an object's schema: its properties are all required, but for the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: object, **bounds: int) -> JsonObject:
    return {"type": "array", "items": items, **bounds}


def _parameter(**known: JsonObject) -> JsonObject:
    """Return the schema of the protocol's parameters: of those that mean something here, and any others."""
    scalar = {"type": ["string", "number", "boolean"], "exclusiveMinimum": -(2**63), "exclusiveMaximum": 2**63}
    return {"type": "object", "properties": known, "additionalProperties": scalar}


def _or_null(schema: JsonObject) -> JsonObject:
    return {**schema, "type": [schema["type"], "null"]}


TEXT, WHOLE, NUMBER, YES = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
FREE = {"type": "object"}
BASE64 = {**TEXT, "contentEncoding": "base64", "description": "Or a data: URI."}
COUNT = _object(count=WHOLE, ns=WHOLE)
SIZE = {**WHOLE, "minimum": 0, "exclusiveMaximum": 2**63}
BINARY = _parameter(binary_data_size={**SIZE, "description": "The bytes after the JSON, in place of data."})
MICROSECONDS = {**SIZE, "description": "Microseconds; 0: none."}
CLASSIFICATION = {**SIZE, "description": "So many best classes as value:index:label, not the logits; 0: the logits."}
TENSOR = {"name": TEXT, "datatype": {**TEXT, "examples": ["FP32", "UINT8", "BYTES"]}, "shape": _list(WHOLE)}
CONFIG_TENSOR = _object("label_filename", name=TEXT, data_type=TEXT, dims=_list(WHOLE), label_filename=TEXT)

SCHEMAS: JsonObject = {
    "Error": _object(error=TEXT),
    "Images": {
        **_object("images", "image", images=_list(_ref("Image"), minItems=1), image=_ref("Image")),
        "anyOf": [{"required": ["images"]}, {"required": ["image"]}],
    },
    "Image": {"anyOf": [BASE64, _object("name", name=TEXT, data=BASE64)]},
    "Prediction": _object(model=TEXT, version=TEXT, images=_list(_ref("ImageAnswer"))),
    "NoPrediction": _object(
        "model", "version", "images", error=TEXT, model=TEXT, version=TEXT, images=_list(_ref("ImageAnswer"))
    ),
    "ImageAnswer": {
        **_object("name", "classes", "error", index=WHOLE, name=TEXT, classes=_list(_ref("Class")), error=TEXT),
        "description": "index: its place in the request. Either classes, the best first, or an error.",
    },
    "Class": _object(**{"class": TEXT, "index": WHOLE, "probability": {**NUMBER, "minimum": 0, "maximum": 1}}),
    "Models": _object(models=_list(_ref("Card"))),
    "Card": _object(
        name=TEXT,
        version=TEXT,
        classes=_list(TEXT),
        preprocess=FREE,
        file={**TEXT, "description": "Which of the run's files is served: a key of its first step's bytes."},
        provider=TEXT,
        steps={**_list(_ref("Step")), "description": "The served run first, then what it was made of."},
    ),
    "Step": _object(
        path={**TEXT, "description": "The name of the run's folder."},
        sha256={**TEXT, "description": "Of its run.json."},
        stage={**TEXT, "examples": ["train", "distill", "prune", "export", "quantize"]},
        created=TEXT,
        dsimg=TEXT,
        git_commit={"type": ["string", "null"]},
        seed={"type": ["integer", "null"]},
        arch=TEXT,
        pruned=YES,
        num_classes=WHOLE,
        input_size=_list(WHOLE),
        parameters={"type": ["integer", "null"]},
        bytes={"type": "object", "additionalProperties": WHOLE},
        accuracy={
            "type": "object",
            "additionalProperties": _object(images=WHOLE, top1=_object(value=NUMBER, interval=_list(NUMBER))),
            "description": "By what it was measured on. interval: 95 %.",
        },
        latency={"type": "object", "additionalProperties": NUMBER, "description": "Seconds, by what was measured."},
        begun_from={"type": ["string", "null"]},
        data={"type": ["object", "null"], "description": "The images that it was trained on."},
    ),
    "ServerMetadata": _object(name=TEXT, version=TEXT, extensions=_list(TEXT)),
    "Health": _object(live=YES, ready=YES),
    "ModelReady": _object(name=TEXT, ready=YES),
    "ModelMetadata": _object(
        name=TEXT,
        versions=_list(TEXT),
        platform=TEXT,
        inputs=_list(_object(**TENSOR)),
        outputs=_list(_object(**TENSOR)),
        properties={"type": "object", "additionalProperties": TEXT},
    ),
    "ModelConfig": _object(
        name=TEXT,
        platform=TEXT,
        backend=TEXT,
        max_batch_size=WHOLE,
        input=_list(CONFIG_TENSOR),
        output=_list(CONFIG_TENSOR),
        dynamic_batching=_object(max_queue_delay_microseconds=WHOLE),
        instance_group=_list(_object(kind=TEXT, count=WHOLE)),
        parameters=FREE,
    ),
    "Statistics": _object(model_stats=_list(_ref("ModelStatistics"))),
    "ModelStatistics": _object(
        name=TEXT,
        version=TEXT,
        last_inference={**WHOLE, "description": "Milliseconds since 1970."},
        inference_count={**WHOLE, "description": "Images."},
        execution_count={**WHOLE, "description": "Batches."},
        inference_stats={"type": "object", "additionalProperties": COUNT},
        batch_stats=_list(_object(batch_size=WHOLE, compute_input=COUNT, compute_infer=COUNT, compute_output=COUNT)),
        memory_usage=_list(FREE),
        response_stats=FREE,
    ),
    "RepositoryIndex": _list(_object(name=TEXT, version=TEXT, state={"enum": ["READY", "LOADING"]})),
    "InferRequest": _object(
        "id",
        "parameters",
        "outputs",
        id=_or_null(TEXT),
        parameters=_or_null(_parameter(binary_data_output=YES, timeout=MICROSECONDS)),
        inputs=_list(
            _object(
                "data",
                "parameters",
                name={"const": "images"},
                datatype={"enum": ["FP32", "UINT8", "BYTES"]},
                shape=_list({**WHOLE, "minimum": 1}),
                data=_or_null(_list({})),
                parameters=_or_null(BINARY),
            ),
            minItems=1,
            maxItems=1,
        ),
        outputs=_or_null(
            _list(
                _object(
                    "parameters",
                    name={"const": "logits"},
                    parameters=_or_null(_parameter(binary_data=YES, classification=CLASSIFICATION)),
                ),
                maxItems=1,
            )
        ),
    ),
    "InferResponse": _object(
        "id",
        "parameters",
        model_name=TEXT,
        model_version=TEXT,
        id=TEXT,
        parameters=_parameter(),
        outputs=_list(_object("data", "parameters", **TENSOR, data=_list({}), parameters=BINARY)),
    ),
}


PARAMETERS: JsonObject = {
    name: {"name": name, "in": where, "required": where == "path", "description": about, "schema": schema}
    for name, where, about, schema in (
        ("name", "path", "The model's name, which is that of its run's folder.", TEXT),
        ("version", "path", "The model's version.", TEXT),
        ("top", "query", "How many of the best classes.", {**WHOLE, "minimum": 1, "default": 5}),
        (
            "X-Request-Timeout",
            "header",
            "Seconds after which the answer is of no use; the server's own deadline stays the bound.",
            {**NUMBER, "exclusiveMinimum": 0},
        ),
        (
            "X-Request-Id",
            "header",
            "A name for the request, which comes back and stands in the log. Without one, or where it is not of 1 to "
            "128 letters, digits and . _ : / + = -, the server makes one.",
            TEXT,
        ),
        ("Inference-Header-Content-Length", "header", "The bytes of JSON in the body, before the tensors'.", SIZE),
        ("Content-Encoding", "header", "How the body is packed.", {"enum": ["gzip", "deflate", "identity", ""]}),
    )
}

HEADERS: JsonObject = {
    "X-Request-Id": {"required": True, "description": "The request's name in the log.", "schema": TEXT},
    "Server-Timing": {
        "required": True,
        "description": "Milliseconds in each stage: read, queue (before decoding and before the call), decode, infer. "
        "Of several images the longest of each. And the images of the largest batch.",
        "schema": {
            **TEXT,
            "examples": ['read;dur=0.07, queue;dur=0.12, decode;dur=7.84, infer;dur=0.76, batch;desc="1"'],
        },
    },
    "Retry-After": {"required": True, "description": "Seconds after which there may be room.", "schema": WHOLE},
    "Accept-Encoding": {"required": True, "description": "gzip, deflate.", "schema": TEXT},
    "WWW-Authenticate": {"required": True, "description": "Bearer.", "schema": TEXT},
    "Inference-Header-Content-Length": {"description": "The bytes of JSON, where tensors follow it.", "schema": WHOLE},
}
