"""What must not be shown or kept."""

from __future__ import annotations

import re


def without_password(text: str) -> str:
    """The text with neither user nor password in its URLs."""
    return re.sub(r"(?<=://)[^/\s]*@", "", text)
