"""The live page, and the headers that keep it to itself: it loads nothing and asks this server alone."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files


def _hashes(tag: str) -> str:
    """The page's inline elements of a kind as a Content-Security-Policy names them."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), PAGE, re.DOTALL)
    return " ".join(f"'sha256-{b64encode(sha256(each).digest()).decode()}'" for each in found)


PAGE = files(__package__).joinpath("page.html").read_bytes()
_POLICY = {
    "default-src": "'none'",
    "script-src": _hashes("script"),
    "style-src": _hashes("style"),
    "img-src": "data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
