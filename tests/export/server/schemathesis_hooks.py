"""What schemathesis cannot know from the document of `dsimg serve`; it imports this for `test_openapi_fuzzed`.

It makes any string where base64 of an image is wanted, any name for a model, and headers that only some bodies go with.
Where it means such a part of a request to be valid, it is made so here. What remains is either wholly valid, and has to
be answered, or is wrong just where schemathesis wanted it to be, and has to be refused.
"""

import base64
import os

import schemathesis
from hypothesis import strategies
from schemathesis.core.parameters import ParameterLocation

PICTURE = "R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="  # a GIF of one pixel
DATA = base64.b64decode(PICTURE)
TENSOR = {"name": "images", "datatype": "BYTES", "shape": [1], "data": [PICTURE]}
KNOWN = {"name": os.environ["DSIMG_MODEL"], "version": os.environ["DSIMG_VERSION"]}
HEADER_LENGTH = "Inference-Header-Content-Length"
CONDITIONAL = (HEADER_LENGTH, "Content-Encoding")  # valid or not by the body

schemathesis.openapi.media_type("application/octet-stream", strategies.just(DATA), aliases=["image/*"])


@schemathesis.hook
def before_call(context, case, kwargs):
    parts = case.meta.components if case.meta else {}

    def valid(location):
        return location not in parts or parts[location].mode.is_positive

    if case.path_parameters and valid(ParameterLocation.PATH):
        case.path_parameters = {name: KNOWN[name] for name in case.path_parameters}
    if valid(ParameterLocation.HEADER):
        headers = {name: value for name, value in (case.headers or {}).items() if name not in CONDITIONAL}
        if case.operation.path.endswith("/infer") and case.media_type == "application/octet-stream":
            headers[HEADER_LENGTH] = "0"
        if headers != dict(case.headers or {}):
            case.headers = headers
    if valid(ParameterLocation.BODY):
        if case.media_type == "application/octet-stream":
            case.body = DATA
        elif isinstance(case.body, dict):
            case.body = _with_pictures(case.body, case.media_type)


def _with_pictures(body, media_type):
    """Return a form or JSON with an image wherever there is to be one."""
    if media_type == "multipart/form-data":
        return dict.fromkeys(body or "a", DATA)
    if "inputs" in body:
        return {**_whole(body), "inputs": [TENSOR]}
    if "images" in body:
        return {
            **body,
            "images": [{**one, "data": PICTURE} if isinstance(one, dict) else PICTURE for one in body["images"]],
        }
    return {**body, "image": PICTURE} if "image" in body else body


def _whole(value):
    """Return JSON whose whole numbers are written so: 2.0 is one to a schema, not to the server."""
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
