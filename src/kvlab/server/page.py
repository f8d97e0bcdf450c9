"""The pages that a server has, and the headers that keep each to itself: it asks this server alone."""

import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em;
color-scheme: light dark }
h2 { font-size: 1.05em; margin: 2em 0 .3em } table { border-collapse: collapse } td, th { padding: .1em 1em .1em 0;
text-align: left; vertical-align: top } code, h2 { font-family: ui-monospace, monospace }
"""


def headers(page: bytes) -> dict[str, str]:
    """The headers of a page, which let it run and load no more than is in it."""
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(page, "script"),
        "style-src": _hashes(page, "style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _hashes(page: bytes, tag: str) -> str:
    """The page's inline elements of a kind as a Content-Security-Policy names them."""
    elements = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(element).digest()).decode()}'" for element in elements) or "'none'"


PAGE = files(__package__).joinpath("page.html").read_bytes()
HEADERS = headers(PAGE)


def reference(document: Mapping[str, Any]) -> bytes:
    """The page of an OpenAPI document."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    schemas = document.get("components", {}).get("schemas", {})
    routes = [
        line
        for path, methods in document["paths"].items()
        for method, route in methods.items()
        for line in _route(f"{method.upper()} {path}", route, schemas)
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    first = f'<h1>{title}</h1><p>For programs: <a href="openapi.json">openapi.json</a></p>'
    page = ["<!doctype html>", f'<html lang="en"><head>{head}<style>{_STYLE}</style></head><body>', first]
    return "\n".join([*page, *routes, "</body></html>\n"]).encode()


def _route(name: str, route: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{escape(name)}</h2>"
    if "description" in route:
        yield f"<p>{escape(route['description'])}</p>"
    fields = [(parameter["name"], parameter["schema"]) for parameter in route.get("parameters", [])]
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    fields += schemas.get(_last(body.get("$ref", "")), {}).get("properties", {}).items()
    if fields:
        yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
        for field, schema in fields:
            text = escape(schema.get("description", ""))
            yield f"<tr><td><code>{escape(field)}</code></td><td>{escape(_kind(schema))}</td><td>{text}</td></tr>"
        yield "</table>"
    yield f"<p>Answers: {escape(', '.join(route['responses']))}</p>"


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(_kind(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if "$ref" in schema:
        return _last(schema["$ref"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _last(reference: str) -> str:
    return reference.rpartition("/")[2]
