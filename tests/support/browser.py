"""The live page in a headless Chromium: that of the system, or the one that `playwright install` brings."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvlab.engine.executors.torch import TorchExecutor
from kvlab.engine.sampler import Sampler
from tests.support.model import tiny_decoder
from tests.support.serving import PacedExecutor

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
DESK = (1280, 900)
WATCHED_S = 0.5  # of a step while it is watched: a busy browser takes its time


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser. The test is skipped where there is none."""
    sync = pytest.importorskip("playwright.sync_api", reason="needs playwright, which `make setup` installs")
    with sync.sync_playwright() as playwright:
        found = next((path for name in _NAMES if (path := shutil.which(name))), None)
        try:
            browser = playwright.chromium.launch(executable_path=found)
        except sync.Error as error:
            pytest.skip(f"needs a Chromium, which `make browser` installs: {error.message.splitlines()[0]}")
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, size: tuple[int, int] = DESK, **options: Any) -> Iterator[Page]:
    """A server's live page. It may log no error, as it would where the policy of its headers forbids something, and
    ask nobody but its server.
    """
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
    page = context.new_page()
    wrong: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{url}/")
    yield page
    context.close()
    assert [text for text in wrong if not text.startswith("Failed to load resource")] == []
    assert [each for each in asked if not each.startswith((url, "data:"))] == []


def paced_executor() -> PacedExecutor:
    """The tiny decoder with steps that a page can watch."""
    found = PacedExecutor(TorchExecutor(tiny_decoder(), Sampler()))
    found.least_s = WATCHED_S
    return found


def send(page: Page, text: str, most: int = 80) -> None:
    """Type a prompt, and send it."""
    page.get_by_label("Max tokens").fill(str(most))
    box = page.locator("#prompt")
    box.fill(text)
    box.press("Enter")


def says(page: Page, selector: str, text: str, seconds: float = 20) -> None:
    """Wait until an element that can be seen has this text as a part."""
    latest, found = time.monotonic() + seconds, page.locator(selector)
    while not (found.count() and found.first.is_visible() and text in found.first.inner_text()):
        assert time.monotonic() < latest, f"{selector} says {found.all_inner_texts()}, not {text!r}"
        page.wait_for_timeout(20)
