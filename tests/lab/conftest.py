"""Settings for the laboratory's tests."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_settings_for_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store and a proxy of the machine's own would replace those that a test names."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
