"""The images in the body of `POST /predict`: raw bytes, multipart/form-data, or JSON with base64."""

import base64
import binascii
import json
import logging
from dataclasses import dataclass
from typing import Any

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from dsimg_export.server.errors import HttpError
from dsimg_export.server.json_text import LONG, Most, load_json

EXAMPLE = '{"images": ["BASE64", ...]}'
DATA_URI = "data:image/"
# It warns of each byte that is wrong in a form: any client could fill whatever keeps what the server prints.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Upload:
    """One image file: what the client calls it, if it does, and its bytes; or why there are none."""

    name: str | None
    data: bytes
    error: str | None = None


def takes_long(body: bytes, content_type: str) -> bool:
    """Return whether reading the images of a body would hold others up: an image's own bytes are taken as they are."""
    return len(body) > LONG and parse_options_header(content_type)[0] in (b"multipart/form-data", b"application/json")


def read_uploads(body: bytes, content_type: str, *, max_images: int) -> list[Upload]:
    """Return the images of a body. Raises HttpError: none, more than `max_images`, or a form that cannot be read.

    A body that is neither multipart nor JSON by its Content-Type is one image, whatever the type says it is.
    """
    kind, options = parse_options_header(content_type)
    if kind == b"multipart/form-data":
        uploads = _from_multipart(body, options.get(b"boundary", b""), max_images)
    elif kind == b"application/json":
        uploads = _from_json(body, max_images)
    else:
        uploads = [Upload(None, body)] if body else []
    if not uploads:
        raise HttpError(400, f"no image. Send an image's bytes, a form with files, or {EXAMPLE}.", kind="request")
    return uploads


def _from_multipart(body: bytes, boundary: bytes, max_images: int) -> list[Upload]:
    """Return the parts that are files, and fields that hold data (curl -F image=<file)."""
    if not boundary:
        raise HttpError(400, "multipart/form-data without a boundary in its Content-Type.", kind="request")
    uploads: list[Upload] = []
    part: dict[str, Any] = {}

    def begin() -> None:
        part.update(field=b"", value=b"", headers={}, data=bytearray())

    def header_end() -> None:
        part["headers"][part["field"].lower()] = part["value"]
        part.update(field=b"", value=b"")

    def grow(key: str, data: bytes, start: int, end: int) -> None:
        part[key] += data[start:end]

    def end() -> None:
        if len(uploads) >= max_images:
            raise _too_many(max_images)
        _, named = parse_options_header(part["headers"].get(b"content-disposition", b""))
        name = named.get(b"filename", named.get(b"name", b""))
        uploads.append(Upload(name.decode("utf-8", "replace") or None, bytes(part["data"])))

    ended: list[bool] = []
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": begin,
                "on_header_field": lambda data, start, stop: grow("field", data, start, stop),
                "on_header_value": lambda data, start, stop: grow("value", data, start, stop),
                "on_header_end": header_end,
                "on_part_data": lambda data, start, stop: grow("data", data, start, stop),
                "on_part_end": end,
                "on_end": lambda: ended.append(True),
            },
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise HttpError(400, f"this is no whole multipart/form-data: {error}.", kind="request") from None
    if not ended:
        raise HttpError(400, "this multipart/form-data is cut off: its last boundary is missing.", kind="request")
    return uploads


def _from_json(body: bytes, max_images: int) -> list[Upload]:
    try:
        most = Most(lists=1 + max_images, values=3 * max_images, strings=4 * max_images)
        content = load_json(body, most, encoding=json.detect_encoding(body))
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"cannot read the body as JSON: {error}. Send {EXAMPLE}.", kind="request") from None
    images = (
        content.get("images", [content["image"]] if "image" in content else None) if isinstance(content, dict) else None
    )
    if not isinstance(images, list):
        raise HttpError(400, f"this JSON holds no list of images. Send {EXAMPLE}.", kind="request")
    if len(images) > max_images:
        raise _too_many(max_images)
    return [_from_base64(image) for image in images]


def _from_base64(image: object) -> Upload:
    """Return an image of the list: base64, or an object with `data` and perhaps `name`. What is wrong fails alone."""
    name: str | None = None
    if isinstance(image, dict):
        given, image = image.get("name"), image.get("data")
        name = given if isinstance(given, str) else None
    if not isinstance(image, str):
        return Upload(name, b"", "not a string of base64")
    if image.startswith(DATA_URI):
        image = image.partition(",")[2]
    try:
        return Upload(name, base64.b64decode(image, validate=True))
    except (binascii.Error, ValueError) as error:
        return Upload(name, b"", f"not base64: {error}")


def _too_many(max_images: int) -> HttpError:
    return HttpError(413, f"more than {max_images} images in one request; send them in several.", kind="limit")
