"""Settings for the laboratory's tests."""

from __future__ import annotations

import sys

import pytest

from tests.support.drawn import in_few_dots

#: The files whose tests ask how figures look.
_LOOKS = ("tests.lab.test_figures", "tests.lab.test_run_figures")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the machine's own would answer for the servers that a test names."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")


@pytest.fixture(autouse=True)
def _figures_in_few_dots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kvlab.lab.figures.style" in sys.modules and request.module.__name__ not in _LOOKS:
        in_few_dots(monkeypatch)
