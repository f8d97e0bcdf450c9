"""A headless Chromium for tests of pages: of the system, or the one that `playwright install` brings."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright, which `make setup` installs")
from playwright.sync_api import Browser, Error, sync_playwright

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser. The test is skipped where there is none."""
    with sync_playwright() as playwright:
        found = next((path for name in _NAMES if (path := shutil.which(name))), None)
        try:
            browser = playwright.chromium.launch(executable_path=found)
        except Error as error:
            pytest.skip(f"needs a Chromium, which `make browser` installs: {error.message.splitlines()[0]}")
        try:
            yield browser
        finally:
            browser.close()
