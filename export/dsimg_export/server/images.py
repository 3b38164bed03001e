"""The images' own routes: POST /predict, and GET /models, what is served."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from dsimg.metrics import best_classes
from dsimg_export.server.classify import classify, deadline_of
from dsimg_export.server.errors import HttpError
from dsimg_export.server.limits import read_body
from dsimg_export.server.model import Model
from dsimg_export.server.protocol import decompress
from dsimg_export.server.state import Server, json_response
from dsimg_export.server.telemetry import server_timing
from dsimg_export.server.uploads import Upload, read_uploads, takes_long

NOT_FINITE = "the network gave NaN or infinity"


async def predict(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """POST /predict: the best classes of each image of the body; one that cannot be read fails alone."""
    model = server.model(request.path_params.get("name"))
    with model.in_use(), server.room.share() as take:
        return await _predict(server, model, request, stages, take)


async def _predict(
    server: Server, model: Model, request: Request, stages: dict[str, float], take: Callable[[int], None]
) -> Response:
    limits = server.limits
    top = _top(request, len(model.classes))
    began = time.monotonic()
    body = await read_body(request, limit=limits.body_bytes, seconds=limits.body_seconds, take=take)
    deadline = deadline_of(request, limits)
    kind = request.headers.get("content-type", "")
    encoding = request.headers.get("content-encoding", "")

    def read() -> tuple[list[Upload], int]:
        whole = decompress(body, encoding, limit=limits.body_bytes) if encoding else body
        return read_uploads(whole, kind, max_images=limits.images), len(whole)

    long = bool(encoding) or takes_long(body, kind)
    uploads, size = await server.beside(read, deadline=deadline) if long else read()
    take(max(0, size - len(body)))
    stages["read"] = time.monotonic() - began
    rows, timing = await classify(server, model, [upload.data for upload in uploads], stages, deadline, request)
    answers = [
        _row(place, upload, row, model, top, server)
        for place, (upload, row) in enumerate(zip(uploads, rows, strict=True))
    ]
    failed = [answer for answer in answers if "error" in answer]
    content: dict[str, Any] = {"model": model.name, "version": model.version, "images": answers}
    status = 200
    if len(failed) == len(answers):
        reasons = {answer["error"] for answer in failed}
        status = 500 if NOT_FINITE in reasons else 400  # by the network, or by what was sent
        content = {"error": reasons.pop() if len(reasons) == 1 else "no image has an answer", **content}
    response = json_response(content, status=status)
    response.headers["server-timing"] = server_timing(stages, batch=timing.batch)
    return response


def _top(request: Request, classes: int) -> int:
    text = request.query_params.get("top", "5")
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise HttpError(400, "top is a whole number of classes above 0.", kind="request")
    return min(int(text[:9]), classes)


def _row(
    place: int, upload: Upload, row: NDArray[np.float32] | str, model: Model, top: int, server: Server
) -> dict[str, Any]:
    """Return what is said of one image."""
    said: dict[str, Any] = {"index": place}
    if upload.name is not None:
        said["name"] = upload.name
    reason = upload.error or (row if isinstance(row, str) else None)
    if reason is not None or isinstance(row, str):
        return {**said, "error": reason}
    (best,) = best_classes(row[None], top)
    if best is None:
        return {**said, "error": NOT_FINITE}
    server.telemetry.confidence.labels(model.name).observe(best[0][1])
    return {**said, "classes": [{"class": model.classes[k], "index": k, "probability": share} for k, share in best]}


async def models(server: Server, request: Request, stages: dict[str, float]) -> Response:
    """GET /models: what is served, and how it was made."""
    return json_response({"models": [model.card for model in server.models.values()]})
