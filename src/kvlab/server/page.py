"""The pages that a server has, and the headers that keep each to itself: it asks this server alone."""

import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Template


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
    text = files(__package__).joinpath("docs.html.j2").read_text(encoding="utf-8")
    template = Template(text, autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    page: str = template.render(document)
    return page.encode()
