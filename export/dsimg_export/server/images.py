"""The images' own routes: POST /predict, and GET /models, what is served."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dsimg.errors import ImageError
from dsimg_export.server.classify import classify, read_request
from dsimg_export.server.errors import HttpError
from dsimg_export.server.model import Model
from dsimg_export.server.stages import Stages
from dsimg_export.server.state import Server, json_response
from dsimg_export.server.telemetry import server_timing
from dsimg_export.server.uploads import Upload, read_uploads, takes_long

NOT_FINITE = "the network gave NaN or infinity"


async def predict(server: Server, request: Request, stages: Stages) -> Response:
    """POST /predict: the best classes of each image of the body; one that cannot be read fails alone."""
    model = server.model(request.path_params.get("name"))
    with model.in_use(), server.room.share() as take:
        return await _predict(server, model, request, stages, take)


async def _predict(
    server: Server, model: Model, request: Request, stages: Stages, take: Callable[[int], None]
) -> Response:
    top = _top(request, len(model.classes))
    kind = request.headers.get("content-type", "")
    uploads, _, deadline = await read_request(
        server,
        request,
        stages,
        take,
        parse=lambda body: read_uploads(body, kind, max_images=server.limits.images),
        takes_long=lambda body: takes_long(body, kind),
    )
    rows = await classify(server, model, [upload.data for upload in uploads], stages, deadline, request)
    said = [str(row) if isinstance(row, ImageError) else row.best(top) or NOT_FINITE for row in rows]
    answers = [
        _answer(place, upload, one, model) for place, (upload, one) in enumerate(zip(uploads, said, strict=True))
    ]
    failed = [answer for answer in answers if "error" in answer]
    content: dict[str, Any] = {"model": model.name, "version": model.version, "images": answers}
    status = 200
    if len(failed) == len(answers):
        reasons = {answer["error"] for answer in failed}
        status = 500 if NOT_FINITE in reasons else 400  # by the network, or by what was sent
        content = {"error": reasons.pop() if len(reasons) == 1 else "no image has an answer", **content}
    response = json_response(content, status=status)
    response.headers["server-timing"] = server_timing(stages)
    return response


def _top(request: Request, classes: int) -> int:
    text = request.query_params.get("top", "5")
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0):
        raise HttpError(400, "top is a whole number of classes above 0.", kind="request")
    return min(int(text[:9]), classes)


def _answer(place: int, upload: Upload, said: list[tuple[int, float]] | str, model: Model) -> dict[str, Any]:
    """Return what is said of one image: its best classes, or why there are none."""
    head = {"index": place} | ({} if upload.name is None else {"name": upload.name})
    reason = upload.error or (said if isinstance(said, str) else None)
    if reason is not None or isinstance(said, str):
        return {**head, "error": reason}
    return {**head, "classes": [{"class": model.classes[k], "index": k, "probability": share} for k, share in said]}


async def models(server: Server, request: Request, stages: Stages) -> Response:
    """GET /models: what is served, and how it was made."""
    return json_response({"models": [model.card for model in server.models.values()]})
