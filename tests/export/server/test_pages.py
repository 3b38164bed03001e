"""The page at `/`, and the document of all routes."""

import base64
import json
import re
from html.parser import HTMLParser

import pytest

from dsimg_export.server.app import build_app
from dsimg_export.server.pages import PAGES, docs_page
from tests.export.golden_runs import encoded_pictures
from tests.export.server.live import serving


@pytest.fixture(scope="module")
def document(live):
    return live.get("/openapi.json").json


def routes(live):
    """Return the method and path of each route."""
    return {
        (method, route.path) for route in build_app(live.server).routes for method in route.methods if method != "HEAD"
    }


def operations(document):
    return {
        (method.upper(), path): operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
    }


def found(document, part):
    """Return a part of the document, or the one that it refers to."""
    while "$ref" in part:
        names = part["$ref"].removeprefix("#/").split("/")
        part = document
        for name in names:
            part = part[name]
    return part


def misfit(document, schema, value, where=""):
    """Return where a value does not fit a schema of the document; None where it does."""
    schema = found(document, schema)
    kinds = {
        "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
        "null": type(None),
    }  # fmt: skip
    kind = schema.get("type", [])
    allowed = [kind] if isinstance(kind, str) else kind
    if allowed and not any(
        isinstance(value, kinds[one]) and (one == "boolean" or not isinstance(value, bool)) for one in allowed
    ):
        return f"{where} is {value!r}, not {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} is {value!r}, not of {schema['enum']}"
    parts = []
    if isinstance(value, dict) and "properties" in schema:
        names = set(schema["properties"])
        if not set(schema.get("required", [])) <= set(value) <= names:
            return f"{where} has {sorted(value)}, not {sorted(names)}"
        parts = [(name, schema["properties"][name], one) for name, one in value.items()]
    elif isinstance(value, dict) and "additionalProperties" in schema:
        parts = [(name, schema["additionalProperties"], one) for name, one in value.items()]
    elif isinstance(value, list) and "items" in schema:
        parts = [(str(place), schema["items"], one) for place, one in enumerate(value)]
    return next(filter(None, (misfit(document, part, one, f"{where}/{name}") for name, part, one in parts)), None)


class Tags(HTMLParser):
    """The tags of a page, with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page.css", "text/css; charset=utf-8"),
        ("/page.js", "text/javascript; charset=utf-8"),
        ("/docs", "text/html; charset=utf-8"),
        ("/openapi.json", "application/json"),
    ],
)
def test_the_pages_come_with_their_types_and_a_strict_policy(live, path, kind):
    answer = live.get(path)
    assert answer.status == 200
    assert answer.headers["content-type"] == kind
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_the_pages_want_no_key_but_what_they_ask_does(run):
    with serving(run.path, keys=(b"first",)) as live:
        assert {live.get(path).status for path in PAGES} == {200}
        assert live.get("/models").status == 401


def test_the_document_says_whether_a_key_is_wanted(run, document):
    assert document["security"] == [{"bearer": []}, {"header": []}, {}]
    with serving(run.path, keys=(b"first",)) as live:
        assert live.get("/openapi.json").json == {**document, "security": [{"bearer": []}, {"header": []}]}


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_has_nothing_inline_and_nothing_from_elsewhere(live, path):
    text = live.get(path).body.decode()
    tags = Tags(text).found
    assert not [tag for tag, _ in tags if tag == "style"]
    assert not [name for _, given in tags for name in given if name == "style" or name.startswith("on")]
    assert all("src" in given for tag, given in tags if tag == "script")
    local = {"page.css", "page.js", "docs", "openapi.json", "."}
    linked = {value for _, given in tags for name, value in given.items() if name in ("src", "href")}
    assert {value for value in linked if not value.startswith("data:")} <= local


def test_the_script_writes_no_html():
    script = PAGES["/page.js"][0].decode()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)
    assert not re.search(r"localStorage|sessionStorage|indexedDB|cookie", script)


def test_every_id_that_the_script_asks_for_is_in_the_page():
    asked = set(re.findall(r'\bat\("([\w-]+)"\)', PAGES["/page.js"][0].decode()))
    given = [attributes["id"] for _, attributes in Tags(PAGES["/"][0].decode()).found if "id" in attributes]
    assert asked
    assert asked <= set(given)
    assert len(given) == len(set(given))


def test_every_route_is_in_the_document_and_no_other(live, document):
    assert set(operations(document)) == routes(live)


def test_the_document_is_whole(document):
    assert document["openapi"].startswith("3.1.")
    refs = re.findall(r'"\$ref": "([^"]+)"', json.dumps(document))
    assert all(found(document, {"$ref": ref}) for ref in refs)
    components = {f"#/components/{kind}/{name}" for kind, named in document["components"].items() for name in named}
    assert components - set(refs) == {f"#/components/securitySchemes/{name}" for name in ("bearer", "header")}
    every = operations(document)
    names = [operation["operationId"] for operation in every.values()]
    assert len(names) == len(set(names))
    for (_, path), operation in every.items():
        given = [found(document, one) for one in operation["parameters"]]
        assert {one["name"] for one in given if one["in"] == "path"} == set(re.findall(r"{(\w+)}", path))
        open_to_all = path in PAGES or path.startswith("/v2/health/")
        assert (operation.get("security") == []) is open_to_all
        assert ("401" in operation["responses"]) is not open_to_all


def test_a_validator_of_openapi_takes_the_document(document):
    validator = pytest.importorskip("openapi_spec_validator", reason="pip install openapi-spec-validator to run this")
    validator.validate(document)


PICTURE = encoded_pictures()[0]
BASE64 = base64.b64encode(PICTURE).decode()
JSON = {"content_type": "application/json"}
INFER = {"id": "a", "inputs": [{"name": "images", "datatype": "BYTES", "shape": [1], "data": [BASE64]}]}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("POST", "/predict", PICTURE, {}, 200),
        ("POST", "/predict?top=2", json.dumps({"images": [{"name": "a", "data": BASE64}, "?"]}).encode(), JSON, 200),
        ("POST", "/predict", b"no image", {}, 400),
        ("POST", "/predict?top=x", PICTURE, {}, 400),
        ("POST", "/predict", b"x" * 20_000, {}, 413),
        ("POST", "/predict", PICTURE, {"x_request_timeout": "0.000001"}, 503),
        ("POST", "/models/{name}/predict", PICTURE, {}, 200),
        ("POST", "/models/nope/predict", PICTURE, {}, 404),
        ("GET", "/models", None, {}, 200),
        ("GET", "/metrics", None, {}, 200),
        ("GET", "/v2", None, {}, 200),
        ("GET", "/v2/health/live", None, {}, 200),
        ("GET", "/v2/health/ready", None, {}, 200),
        ("GET", "/v2/models/stats", None, {}, 200),
        ("POST", "/v2/repository/index", b"", {}, 200),
        ("GET", "/v2/models/{name}", None, {}, 200),
        ("GET", "/v2/models/{name}/ready", None, {}, 200),
        ("GET", "/v2/models/{name}/config", None, {}, 200),
        ("GET", "/v2/models/{name}/versions/{version}/stats", None, {}, 200),
        ("GET", "/v2/models/{name}/versions/7", None, {}, 404),
        ("POST", "/v2/models/{name}/infer", json.dumps(INFER).encode(), JSON, 200),
        ("POST", "/v2/models/{name}/infer", PICTURE, {"inference_header_content_length": "0"}, 200),
        ("POST", "/v2/models/{name}/infer", b"{}", JSON, 400),
        ("POST", "/v2/models/{name}/infer", b"{}", {**JSON, "content_encoding": "br"}, 415),
    ],
)
def test_what_the_server_says_is_what_the_document_says(run, document, method, path, body, headers, status):
    with serving(run.path, max_body_mib=0.01) as live:
        (model,) = live.server.models.values()
        answer = live.ask(method, path.format(name=model.name, version=model.version), body, **headers)
    assert answer.status == status
    route = path.partition("?")[0].replace("nope", "{name}").replace("versions/7", "versions/{version}")
    operation = operations(document)[method, route]
    response = found(document, operation["responses"][str(status)])
    content = response["content"][answer.headers["content-type"].partition(";")[0]]
    promised = {name.lower() for name in response.get("headers", {})}
    assert promised - set(answer.headers) <= {"inference-header-content-length"}  # of binary answers alone
    if answer.headers["content-type"] == "application/json":
        assert misfit(document, content["schema"], answer.json) is None


def test_the_docs_tell_of_every_route(live, document):
    text = live.get("/docs").body.decode()
    shown = re.findall(r"<summary><b [^>]+>(\w+)</b> <code>([^/]*(?:/<wbr>[^/<]*)*)</code>", text)
    assert {(method, path.replace("<wbr>", "")) for method, path in shown} == routes(live)


def test_the_docs_escape_what_they_quote(document):
    info = {**document["info"], "description": "<b>bold</b>"}
    assert "<b>bold</b>" not in docs_page({**document, "info": info})
