"""The routes of the Open Inference Protocol v2, for everyone's clients; its wire format is in `protocol`."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

import dsimg
from dsimg.errors import ImageError
from dsimg_export.server import protocol
from dsimg_export.server.classify import classify, read_request
from dsimg_export.server.errors import HttpError
from dsimg_export.server.json_text import LONG
from dsimg_export.server.limits import read_body
from dsimg_export.server.model import Model
from dsimg_export.server.stages import Stages
from dsimg_export.server.state import Server, json_response
from dsimg_export.server.telemetry import server_timing
from dsimg_export.session import INPUT, OUTPUT


async def server_metadata(server: Server, request: Request, stages: Stages) -> Response:
    """GET /v2."""
    return json_response(protocol.server_metadata(dsimg.__version__))


async def live(server: Server, request: Request, stages: Stages) -> Response:
    """GET /v2/health/live."""
    return json_response({"live": True, "ready": server.ready})


async def ready(server: Server, request: Request, stages: Stages) -> Response:
    """GET /v2/health/ready: 200 or 503."""
    good = server.ready
    return json_response({"live": True, "ready": good}, status=200 if good else 503)


async def model_ready(server: Server, request: Request, stages: Stages) -> Response:
    """GET /v2/models/M/ready."""
    model = _named(server, request)
    good = server.ready
    return json_response({"name": model.name, "ready": good}, status=200 if good else 503)


async def model_metadata(server: Server, request: Request, stages: Stages) -> Response:
    """GET /v2/models/M."""
    model = _named(server, request)
    inputs, outputs = specs(model)
    properties = {"provider": model.plan.provider, "arch": str(model.served.run.model["arch"])}
    return json_response(
        protocol.metadata(
            model.name,
            versions=[model.version],
            platform="onnxruntime_onnx",
            inputs=inputs[:1],
            outputs=outputs,
            properties={**properties, "encoded_images": f"{INPUT} also takes image files, as BYTES [-1]"},
        )
    )


async def model_config(server: Server, request: Request, stages: Stages) -> Response:
    """GET /v2/models/M/config, in the words of Triton's model configuration."""
    model = _named(server, request)
    inputs, outputs = specs(model)
    return json_response(
        {
            "name": model.name,
            "platform": "onnxruntime_onnx",
            "backend": "onnxruntime",
            "max_batch_size": server.limits.images,  # of a request, as Triton means it
            "input": [_config_tensor(inputs[0])],
            "output": [{**_config_tensor(outputs[0]), "label_filename": "labels.txt"}],
            "dynamic_batching": {"max_queue_delay_microseconds": round(1e6 * model.plan.max_delay)},
            "instance_group": [
                {"kind": "KIND_CPU" if model.plan.provider == "cpu" else "KIND_GPU", "count": model.plan.workers}
            ],
            "parameters": {"intra_op_thread_count": {"string_value": str(model.plan.threads)}},
        }
    )


async def statistics(server: Server, request: Request, stages: Stages) -> Response:
    """GET /v2/models/stats and /v2/models/M/stats."""
    named = [_named(server, request)] if "name" in request.path_params else list(server.models.values())
    return json_response({"model_stats": [model.statistics() for model in named]})


async def repository_index(server: Server, request: Request, stages: Stages) -> Response:
    """POST /v2/repository/index."""
    body = await read_body(request, limit=LONG, seconds=server.limits.body_seconds)
    ready_only = protocol.parse_index(body)
    return json_response(
        [
            {
                "name": model.name,
                "version": model.version,
                "state": "READY" if server.ready else "LOADING",
            }
            for model in server.models.values()
            if server.ready or not ready_only
        ]
    )


async def infer(server: Server, request: Request, stages: Stages) -> Response:
    """POST /v2/models/M/infer: the network's own input, or encoded images as BYTES."""
    model = _named(server, request)
    with model.in_use(), server.room.share() as take:
        return await _infer(server, model, request, stages, take)


async def _infer(
    server: Server, model: Model, request: Request, stages: Stages, take: Callable[[int], None]
) -> Response:
    header_length = request.headers.get("inference-header-content-length")
    inputs, outputs = specs(model)
    asked, there, deadline = await read_request(
        server,
        request,
        stages,
        take,
        parse=lambda body: protocol.parse_infer(
            body,
            header_length=header_length,
            model=model.name,
            inputs=inputs,
            outputs=outputs,
            max_batch=server.limits.images,
        ),
        takes_long=lambda body: protocol.json_length(body, header_length) > LONG,
    )
    timeout = asked.parameters.get("timeout", 0)  # of Triton's clients, in microseconds; 0: none
    if type(timeout) is not int or timeout < 0:
        raise protocol.ProtocolError("'timeout' must be a whole number of microseconds, from 0 on.")
    if timeout:
        deadline = min(deadline, there + timeout / 1e6)
    (tensor,) = asked.inputs
    images: list[bytes] | list[NDArray[Any]]
    images = [bytes(data) for data in tensor.data] if tensor.datatype == "BYTES" else list(tensor.data)
    rows = await classify(server, model, images, stages, deadline, request)
    for place, row in enumerate(rows):
        if isinstance(row, ImageError):
            raise HttpError(400, f"image {place}: {row}", kind="image")
    logits = np.stack([row.logits for row in rows if not isinstance(row, ImageError)])
    content, headers = protocol.answer_infer(
        asked, {OUTPUT: logits}, model=model.name, version=model.version, labels=model.classes
    )
    return Response(content, headers={**headers, "server-timing": server_timing(stages)})


def specs(model: Model) -> tuple[list[protocol.TensorSpec], list[protocol.TensorSpec]]:
    """Return what a model takes and gives. Its input may also come as encoded images."""
    datatype = "UINT8" if model.takes_pixels else "FP32"
    return (
        [
            protocol.TensorSpec(name=INPUT, datatype=datatype, shape=(-1, *model.input_shape)),
            protocol.TensorSpec(name=INPUT, datatype="BYTES", shape=(-1,)),
        ],
        [protocol.TensorSpec(name=OUTPUT, datatype="FP32", shape=(-1, len(model.classes)))],
    )


def _named(server: Server, request: Request) -> Model:
    return server.model(request.path_params["name"], request.path_params.get("version"))


def _config_tensor(spec: protocol.TensorSpec) -> Mapping[str, Any]:
    return {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": list(spec.shape[1:])}
