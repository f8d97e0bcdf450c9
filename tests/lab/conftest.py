"""Settings for the laboratory's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the machine's own would answer for the servers that a test names."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
