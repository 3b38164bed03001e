"""What is served for people: the page at `/`, and the routes at `/docs` and `/openapi.json`. Made once."""

import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from dsimg_export.server.openapi import openapi
from dsimg_export.server.stages import Stages
from dsimg_export.server.state import Handler, Server

HTML = "text/html; charset=utf-8"


class Page(NamedTuple):
    """What lies at a path: its bytes, their type, and what is there instead where the server wants a key."""

    content: bytes
    kind: str
    with_keys: bytes | None = None


def make_pages() -> dict[str, Page]:
    """Return what lies at each path."""
    folder = files("dsimg_export.server") / "page"
    said, said_with_keys = (json.dumps(openapi(keys=keys)).encode() for keys in (False, True))
    return {
        "/": Page((folder / "index.html").read_bytes(), HTML),
        "/page.css": Page((folder / "page.css").read_bytes(), "text/css; charset=utf-8"),
        "/page.js": Page((folder / "page.js").read_bytes(), "text/javascript; charset=utf-8"),
        "/docs": Page(docs_page(openapi()).encode(), HTML),
        "/openapi.json": Page(said, "application/json", said_with_keys),
    }


def handler(content: bytes, kind: str, with_keys: bytes | None = None) -> Handler:
    """Return a handler of `app` that answers with a page."""

    async def answer(server: Server, request: Request, stages: Stages) -> Response:
        shown = with_keys if with_keys is not None and server.keys else content
        return Response(shown, headers={"content-type": kind})

    return answer


def docs_page(document: Mapping[str, Any]) -> str:
    """Return an OpenAPI document as a page without scripts: a part for each tag, a fold for each route."""
    info = document["info"]
    parts = [
        "<header><h1>The routes of dsimg serve</h1>"
        f'<p class="intro">{escape(info["description"])}</p>'
        '<p><a href=".">Try pictures</a>, or take this as <a href="openapi.json">OpenAPI</a>. '
        f'<span class="faint">dsimg {escape(info["version"])}</span></p></header><main class="document">'
    ]
    for tag in document["tags"]:
        name = tag["name"]
        parts.append(
            f'<section class="routes" aria-labelledby="{name}"><h2 id="{name}">{escape(name.capitalize())}</h2>'
        )
        parts.append(f'<p class="intro">{escape(tag["description"])}</p>')
        for path, item in document["paths"].items():
            parts += [_route(document, path, method, op) for method, op in item.items() if name in op["tags"]]
        parts.append("</section>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<title>dsimg: routes</title><link rel="icon" href="data:,"><link rel="stylesheet" href="page.css"></head>\n'
        "<body>" + "\n".join(parts) + "</main></body></html>\n"
    )


def _route(document: Mapping[str, Any], path: str, method: str, operation: Mapping[str, Any]) -> str:
    given = [_found(document, one) for one in operation["parameters"]]
    parts = [
        f'<details class="route panel"><summary><b class="{method}">{method.upper()}</b> '
        f"<code>{_breakable(path)}</code> {escape(operation['summary'])}</summary>",
        "<h3>Takes</h3>",
        _terms({f"{one['name']} ({one['in']})": escape(one["description"]) for one in given}),
    ]
    body = operation.get("requestBody")
    if body:
        parts.append(f"<h3>Body</h3><p>{escape(body['description'])}</p>")
        parts.append(_terms({kind: _shape(document, content) for kind, content in body["content"].items()}))
    answers = {}
    for status, one in sorted(operation["responses"].items()):
        response = _found(document, one)
        shapes = "".join(_shape(document, content) for content in response["content"].values() if status < "400")
        answers[status] = f"{escape(response['description'])}{shapes}"
    parts += ["<h3>Answers</h3>", _terms(answers), "</details>"]
    return "".join(parts)


def _terms(said: Mapping[str, str]) -> str:
    """Return a list of names and what is said of each, which is HTML."""
    rows = (f"<dt><code>{escape(name)}</code></dt><dd>{text}</dd>" for name, text in said.items())
    return f"<dl>{''.join(rows)}</dl>"


def _shape(document: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return an example of a body, or its schema in the shape of one."""
    schema = content.get("schema", {})
    if "example" not in content and "description" in schema:
        return escape(schema["description"])
    shown = content.get("example", _skeleton(document, schema))
    return f"<pre>{escape(json.dumps(shown, indent=2))}</pre>" if shown else "its bytes"


def _skeleton(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Any:
    """Return what fits a schema, with the types' names in place of values."""
    schema = _found(document, schema)
    if "properties" in schema:
        return {name: _skeleton(document, part) for name, part in schema["properties"].items()}
    if "additionalProperties" in schema:
        return {"...": _skeleton(document, schema["additionalProperties"])}
    if "items" in schema:
        return [_skeleton(document, schema["items"])]
    kind = schema.get("type", schema.get("enum", ""))
    return " or ".join(kind) if isinstance(kind, list) else kind


def _breakable(path: str) -> str:
    return re.sub("/", "/<wbr>", escape(path))


def _found(document: Mapping[str, Any], part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a part of the document, or the one that it refers to."""
    if "$ref" not in part:
        return part
    found: Any = document
    for name in part["$ref"].removeprefix("#/").split("/"):
        found = found[name]
    result: Mapping[str, Any] = found
    return result


PAGES = make_pages()
