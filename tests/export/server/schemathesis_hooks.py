"""What schemathesis cannot know of a request to `dsimg serve`, from the document: read by `test_openapi_fuzzed`.

It makes strings where images in base64 are wanted, names where there is one model, headers that only some bodies go with.
Here such values are made right wherever the case means them to be valid, so that what remains is either wholly valid, and
has to be answered, or is wrong just where schemathesis made it so, and has to be refused.
"""

import base64
import os

import schemathesis
from hypothesis import strategies as st
from schemathesis.core.parameters import ParameterLocation

PICTURE = "R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="  # a GIF of one pixel
DATA = base64.b64decode(PICTURE)
KNOWN = {"name": os.environ["DSIMG_MODEL"], "version": os.environ["DSIMG_VERSION"]}
HEADER_LENGTH = "Inference-Header-Content-Length"

schemathesis.openapi.media_type("application/octet-stream", st.just(DATA), aliases=["image/*"])


@schemathesis.hook
def before_call(context, case, kwargs):
    parts = case.meta.components if case.meta else {}

    def valid(location):
        return location not in parts or parts[location].mode.is_positive

    if case.path_parameters and valid(ParameterLocation.PATH):
        case.path_parameters = {name: KNOWN[name] for name in case.path_parameters}
    if case.headers and valid(ParameterLocation.HEADER):
        case.headers.pop(HEADER_LENGTH, None)
        case.headers.pop("Content-Encoding", None)
        if case.media_type == "application/octet-stream" and case.path.endswith("/infer"):
            case.headers[HEADER_LENGTH] = "0"
    if valid(ParameterLocation.BODY):
        form = case.media_type == "multipart/form-data"
        case.body = {name: DATA for name in case.body or "a"} if form else with_pictures(case.body)


def with_pictures(body):
    """Return a body with an image wherever there is to be one."""
    if not isinstance(body, dict):
        return body
    if "inputs" in body:
        return {**body, "inputs": [{"name": "images", "datatype": "BYTES", "shape": [1], "data": [PICTURE]}]}
    if "images" in body or "image" in body:
        images = [_picture(image) for image in body.get("images", [])]
        return {**body, **({"images": images} if "images" in body else {"image": PICTURE})}
    return body


def _picture(image):
    return {**image, "data": PICTURE} if isinstance(image, dict) else PICTURE
