"""What the server's routes take and give, as an OpenAPI 3.1 document."""

from collections.abc import Mapping
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

REFUSALS = {
    400: "The request is malformed; the error says where.",
    401: "A key is wanted.",
    404: "There is no such model, or no such version of it.",
    408: "The body came too slowly.",
    413: "The body is too large, or holds too many images.",
    500: "The network gave NaN or infinity, which the answer asked for cannot hold.",
    501: "The Content-Encoding is neither gzip nor deflate.",
    503: "There is no room, or the answer would come too late.",
}


def openapi() -> JsonObject:
    """Return the document. It has a path for each route of `app.build_app`, and no others."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "dsimg serve", "version": dsimg.__version__, "description": ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"header": []}, {}],
        "tags": [{"name": name, "description": about} for name, about in TAGS.items()],
        "paths": {**_images(), **_server(), **_protocol(), **_pages()},
        "components": {
            "schemas": SCHEMAS,
            "parameters": PARAMETERS,
            "headers": HEADERS,
            "responses": {str(status): _refusal(status, about) for status, about in REFUSALS.items()},
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
        "additionalProperties": {"contentMediaType": "application/octet-stream"},
    }
    photo = {"class": "tabby", "index": 281, "probability": 0.93}
    body = {
        "required": True,
        "description": "One image as it is, a form of files, or JSON with base64. A body that is neither form nor JSON "
        "is one image, whatever its type says.",
        "content": {
            "application/octet-stream": {},
            "image/*": {},
            "multipart/form-data": {"schema": form},
            "application/json": {
                "schema": _ref("Images"),
                "example": {"images": ["BASE64", {"name": "b", "data": "BASE64"}]},
            },
        },
    }
    answers = {
        "200": _json(
            "The best classes of each image, in order; an image that cannot be read has an error instead.",
            "Prediction",
            headers=("Server-Timing",),
            example={"model": "r18", "version": "194d5ebd6119", "images": [{"index": 0, "classes": [photo]}]},
        ),
        **_refused(401, 408, 413, 503),
        "400": _json("No image could be read, or the request is malformed.", "NoPrediction"),
    }
    said: Mapping[str, Any] = {"parameters": _parameters("top", "X-Request-Timeout"), "requestBody": body}
    named = {**answers, **_refused(404)}
    return {
        "/predict": {
            "post": _operation(
                "images", "predict", "The best classes of each image, by the first model", responses=answers, **said
            )
        },
        "/models/{name}/predict": {
            "post": _operation(
                "images", "predict_by", "The same, by a model that is named", path=("name",), responses=named, **said
            )
        },
    }


def _server() -> JsonObject:
    text = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    return {
        "/models": _get("server", "models", "What is served, and the steps by which it was made", "Models"),
        "/metrics": {
            "get": _operation("server", "metrics", "Metrics for Prometheus", responses={"200": text, **_refused(401)})
        },
    }


def _protocol() -> JsonObject:
    here: Mapping[str, Any] = {"security": [], "refused": ()}
    late = {"503": _json("It does not take requests now.", "Health")}
    paths = {
        "/v2": _get("protocol", "server_metadata", "The server's name, version and extensions", "ServerMetadata"),
        "/v2/": _get("protocol", "server_metadata_slash", "The same", "ServerMetadata"),
        "/v2/health/live": _get("protocol", "live", "Whether the server lives; no key is wanted", "Health", **here),
        "/v2/health/ready": _get(
            "protocol", "ready", "Whether it takes requests; no key is wanted", "Health", more=late, **here
        ),
        "/v2/models/stats": _get(
            "protocol", "statistics", "What every model has done since it was loaded", "Statistics"
        ),
        "/v2/repository/index": {
            "post": _operation(
                "protocol",
                "repository_index",
                "The models and their states",
                requestBody={
                    "description": "ready: leave out what does not take requests.",
                    "content": {"application/json": {"schema": _object("ready", ready=YES)}},
                },
                responses={"200": _json("The models.", "RepositoryIndex"), **_refused(400, 401, 408, 413)},
            )
        },
    }
    for place, names, suffix in (
        ("/v2/models/{name}", ("name",), ""),
        ("/v2/models/{name}/versions/{version}", ("name", "version"), "_of_version"),
    ):
        of: Mapping[str, Any] = {"path": names, "refused": (401, 404)}
        late = {"503": _json("It does not take requests now.", "ModelReady")}
        paths |= {
            place: _get("protocol", f"model{suffix}", "A model's inputs and outputs", "ModelMetadata", **of),
            f"{place}/ready": _get(
                "protocol", f"model_ready{suffix}", "Whether a model takes requests", "ModelReady", more=late, **of
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
    binary = {
        "description": "JSON, then the tensors' bytes, in order; Inference-Header-Content-Length says where they begin."
    }
    asked = {"inputs": [{"name": "images", "datatype": "BYTES", "shape": [1], "data": ["BASE64"]}]}
    best = {"name": "logits", "parameters": {"classification": 5}}
    return _operation(
        "protocol",
        name,
        "The network's answer to its own input, or to image files as BYTES",
        path=path,
        parameters=_parameters("X-Request-Timeout", "Inference-Header-Content-Length", "Content-Encoding"),
        requestBody={
            "required": True,
            "description": f"JSON. {binary['description']} Where it says 0, the body is the one input's bytes.",
            "content": {
                "application/json": {"schema": _ref("InferRequest"), "example": {**asked, "outputs": [best]}},
                "application/octet-stream": {},
            },
        },
        responses={
            "200": {
                "description": f"The outputs that were asked for, as JSON, or where binary data were asked for: "
                f"{binary['description']}",
                "headers": _headers("X-Request-Id", "Server-Timing", "Inference-Header-Content-Length"),
                "content": {
                    "application/json": {"schema": _ref("InferResponse")},
                    "application/octet-stream": {},
                },
            },
            **_refused(400, 401, 404, 408, 413, 500, 501, 503),
        },
    )


def _pages() -> JsonObject:
    kinds = {
        "/": ("text/html", "page", "The page to try pictures on"),
        "/page.css": ("text/css", "page_css", "Its style"),
        "/page.js": ("text/javascript", "page_js", "Its script"),
        "/docs": ("text/html", "docs", "This document as a page"),
        "/openapi.json": ("application/json", "openapi", "This document"),
    }
    return {
        path: {
            "get": _operation(
                "page",
                name,
                f"{about}; no key is wanted",
                security=[],
                responses={
                    "200": {"description": about + ".", "headers": _headers("X-Request-Id"), "content": {kind: {}}}
                },
            )
        }
        for path, (kind, name, about) in kinds.items()
    }


# Parts of it


def _operation(tag: str, name: str, summary: str, *, path: tuple[str, ...] = (), **rest: Any) -> JsonObject:
    """Return an operation; path: the names in its path. Every one takes X-Request-Id."""
    parameters = [*_parameters(*path), *rest.pop("parameters", []), *_parameters("X-Request-Id")]
    return {"operationId": name, "tags": [tag], "summary": summary, "parameters": parameters, **rest}


def _get(
    tag: str,
    name: str,
    summary: str,
    schema: str,
    *,
    refused: tuple[int, ...] = (401,),
    more: Mapping[str, Any] | None = None,
    **rest: Any,
) -> JsonObject:
    responses = {"200": _json(f"{summary}.", schema), **(more or {}), **_refused(*refused)}
    return {"get": _operation(tag, name, summary, responses=responses, **rest)}


def _json(about: str, schema: str, *, headers: tuple[str, ...] = (), example: object = None) -> JsonObject:
    content = {"schema": _ref(schema), **({"example": example} if example is not None else {})}
    return {
        "description": about,
        "headers": _headers("X-Request-Id", *headers),
        "content": {"application/json": content},
    }


def _refusal(status: int, about: str) -> JsonObject:
    headers = {401: ("WWW-Authenticate",), 503: ("Retry-After",)}.get(status, ())
    return _json(about, "Error", headers=headers)


def _refused(*statuses: int) -> JsonObject:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _ref(schema: str) -> JsonObject:
    return {"$ref": f"#/components/schemas/{schema}"}


def _parameters(*names: str) -> list[JsonObject]:
    return [{"$ref": f"#/components/parameters/{name}"} for name in names]


def _headers(*names: str) -> JsonObject:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _object(*optional: str, **properties: object) -> JsonObject:
    """Return an object's schema: its properties are all required, but for the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: object) -> JsonObject:
    return {"type": "array", "items": items}


TEXT, WHOLE, NUMBER, YES = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
FREE = {"type": "object"}
COUNT = _object(count=WHOLE, ns=WHOLE)
PARAMETER = {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}
TENSOR_PARAMETERS = {
    **PARAMETER,
    "description": "binary_data_size: the tensor's bytes after the JSON, in place of data.",
}
TENSOR = {"name": TEXT, "datatype": {**TEXT, "examples": ["FP32", "UINT8", "BYTES"]}, "shape": _list(WHOLE)}
CONFIG_TENSOR = _object("label_filename", name=TEXT, data_type=TEXT, dims=_list(WHOLE), label_filename=TEXT)

SCHEMAS: JsonObject = {
    "Error": _object(error=TEXT),
    "Images": {
        "anyOf": [
            _object(images=_list({"anyOf": [{**TEXT, "contentEncoding": "base64"}, _ref("Image")]})),
            _object(image={"anyOf": [{**TEXT, "contentEncoding": "base64"}, _ref("Image")]}),
        ]
    },
    "Image": _object("name", name=TEXT, data={**TEXT, "contentEncoding": "base64", "description": "Or a data: URI."}),
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
        id=TEXT,
        parameters={**PARAMETER, "description": "binary_data_output: true or false. timeout: microseconds."},
        inputs=_list(_object("data", "parameters", **TENSOR, data=_list({}), parameters=TENSOR_PARAMETERS)),
        outputs=_list(
            _object(
                "parameters",
                name=TEXT,
                parameters={
                    **PARAMETER,
                    "description": "binary_data: true or false. classification: so many of the best classes, as "
                    "value:index:label, in place of the logits.",
                },
            )
        ),
    ),
    "InferResponse": _object(
        "id",
        "parameters",
        model_name=TEXT,
        model_version=TEXT,
        id=TEXT,
        parameters=PARAMETER,
        outputs=_list(_object("data", "parameters", **TENSOR, data=_list({}), parameters=TENSOR_PARAMETERS)),
    ),
}


def _given(name: str, where: str, about: str, schema: JsonObject) -> JsonObject:
    return {"name": name, "in": where, "required": where == "path", "description": about, "schema": schema}


PARAMETERS: JsonObject = {
    "name": _given("name", "path", "The model's name, which is that of its run's folder.", TEXT),
    "version": _given("version", "path", "The model's version.", TEXT),
    "top": _given("top", "query", "How many of the best classes.", {**WHOLE, "minimum": 1, "default": 5}),
    "X-Request-Timeout": _given(
        "X-Request-Timeout",
        "header",
        "Seconds after which the answer is of no use; the server's own deadline stays the bound.",
        {**NUMBER, "exclusiveMinimum": 0},
    ),
    "X-Request-Id": _given(
        "X-Request-Id",
        "header",
        "A name for the request, which comes back and stands in the log. Without one, or where it does not fit, the "
        "server makes one.",
        {**TEXT, "pattern": "^[A-Za-z0-9._:/+=-]{1,128}$"},
    ),
    "Inference-Header-Content-Length": _given(
        "Inference-Header-Content-Length",
        "header",
        "The bytes of JSON at the beginning of the body, where tensors follow it.",
        {**WHOLE, "minimum": 0},
    ),
    "Content-Encoding": _given("Content-Encoding", "header", "How the body is packed.", {"enum": ["gzip", "deflate"]}),
}

HEADERS: JsonObject = {
    "X-Request-Id": {"description": "The request's name in the log.", "schema": TEXT},
    "Server-Timing": {
        "description": "Milliseconds in each stage (read, decode, queue, infer), and the images of the batch.",
        "schema": {
            **TEXT,
            "examples": ['read;dur=0.07, decode;dur=7.84, queue;dur=0.02, infer;dur=0.76, batch;desc="1"'],
        },
    },
    "Retry-After": {"description": "Seconds after which there may be room.", "schema": WHOLE},
    "WWW-Authenticate": {"description": "Bearer.", "schema": TEXT},
    "Inference-Header-Content-Length": {
        "description": "The bytes of JSON, where tensors follow it.",
        "schema": WHOLE,
    },
}
