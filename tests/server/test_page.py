"""The live page in a headless Chromium."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright, which `make setup` installs")
from playwright.sync_api import Browser, Page, ViewportSize, expect

from kvlab.config.server import ServerConfig
from kvlab.engine.executors.torch import TorchExecutor
from kvlab.engine.sampler import Sampler
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.view import CacheView
from tests.support.browser import chromium
from tests.support.engines import assert_empty
from tests.support.model import tiny_decoder
from tests.support.pools import sharing_pool
from tests.support.serving import Served, served

PHONE, DESK = ViewportSize(width=360, height=740), ViewportSize(width=1280, height=900)


class Slow(TorchExecutor):
    """Steps that a page can watch."""

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        time.sleep(0.04)
        return super().execute(step, view)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(pool=sharing_pool(), executor=Slow(tiny_decoder(), Sampler())) as found:
        yield found


@contextmanager
def opened(browser: Browser, server: Served, size: ViewportSize = DESK, **options: Any) -> Iterator[Page]:
    """The page. It may log no error, as it would where the policy of its headers forbids something, and ask nobody
    but its server.
    """
    context = browser.new_context(viewport=size, **options)
    page = context.new_page()
    wrong: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{server.url}/")
    yield page
    context.close()
    assert [text for text in wrong if not text.startswith("Failed to load resource")] == []
    assert [url for url in asked if not url.startswith((server.url, "data:"))] == []


def wait_until_empty(server: Served) -> None:
    core, deadline = server.serving.engine.core, time.monotonic() + 30
    while core.has_work():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert_empty(core)


def send(page: Page, text: str, most: int = 80) -> None:
    page.get_by_label("Max tokens").fill(str(most))
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESK, "light")], ids=["phone", "desk"])
def test_everything_fits_and_every_text_can_be_read(
    browser: Browser, server: Served, size: ViewportSize, scheme: Any
) -> None:
    with opened(browser, server, size, color_scheme=scheme) as page:
        send(page, "abcdefgh", most=20)
        expect(page.locator("#rows tr")).to_have_count(1)
        expect(page.locator("#result")).to_contain_text("20 tokens", timeout=20_000)
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
        assert page.evaluate(CONTRAST) == []
    wait_until_empty(server)


# Texts with less contrast to what is behind them than WCAG 2.2 asks of text: 4.5.
CONTRAST = """() => {
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const found = parse(getComputedStyle(element).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const pale = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !parent.checkVisibility() || ["SCRIPT", "STYLE"].includes(parent.tagName)) continue;
    const [a, b] = [parse(getComputedStyle(parent).color), behind(parent)].map((rgb) => light(rgb.slice(0, 3)));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) pale.push(`${text}: ${contrast.toFixed(2)}`);
  }
  return pale;
}"""


def test_a_request_is_watched_from_its_prompt_to_its_end(browser: Browser, server: Served) -> None:
    with opened(browser, server) as page:
        expect(page.locator("#status")).to_have_text("ready")
        send(page, "watched", most=40)
        row = page.locator("#rows tr")
        expect(row).to_contain_text("decode")
        expect(page.locator("#decode")).to_have_text("1")
        expect(page.locator("#legend")).not_to_contain_text("in use 0")
        page.locator("#map").press("ArrowRight")
        expect(page.locator("#pointed")).to_contain_text("block 0: ")
        row.get_by_role("button").click()
        expect(row.get_by_role("button")).to_have_attribute("aria-pressed", "true")
        expect(page.locator("#result")).to_contain_text("40 tokens, the first after", timeout=20_000)
        expect(page.locator("#result")).to_contain_text(" of 14 prompt tokens from the prefix cache")
        expect(row).to_have_count(0)
        expect(page.locator("#legend")).to_contain_text("in use 0")
        # The second turn sends the first along, and finds its blocks in the cache.
        send(page, "more", most=2)
        expect(page.locator("#result")).to_contain_text("of 77 prompt tokens", timeout=20_000)
        expect(page.locator("#hits")).not_to_have_text("0 %")
    wait_until_empty(server)


def test_an_answer_is_stopped_and_gives_its_memory_back(browser: Browser, server: Served) -> None:
    with opened(browser, server) as page:
        stop = page.get_by_role("button", name="Stop")
        expect(stop).to_be_hidden()
        send(page, "abc")
        expect(page.locator("#decode")).to_have_text("1")
        stop.click()
        expect(page.locator("#result")).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        wait_until_empty(server)
        page.get_by_role("button", name="New conversation").click()
        send(page, "abc")
        expect(page.locator("#decode")).to_have_text("1")
        page.keyboard.press("Escape")
        expect(page.locator("#result")).to_contain_text("stopped")
    wait_until_empty(server)


def test_what_people_and_models_write_stays_text(browser: Browser, server: Served) -> None:
    hostile = "<img src=x onerror=alert(1)><b>bold</b>"
    with opened(browser, server) as page:
        send(page, hostile, most=1)
        expect(page.locator("#log .user")).to_have_text(hostile)
        assert page.locator("#log img, #log b").count() == 0
        expect(page.locator("#result")).to_contain_text("1 token")


def test_an_error_is_told_and_the_prompt_stays(browser: Browser, server: Served) -> None:
    with opened(browser, server) as page:
        page.get_by_label("Max tokens").fill("9")
        send(page, "x" * 200)
        expect(page.locator("#log .wrong")).to_contain_text("leaves no room")
        expect(page.get_by_label("Message")).to_have_value("x" * 200)


def test_a_model_without_words_is_asked_in_token_ids(browser: Browser) -> None:
    with served(words=False) as server, opened(browser, server) as page:
        box = page.get_by_label("Token ids to continue")
        box.fill("five six")
        box.press("Enter")
        expect(page.locator("#result")).to_have_text(
            "Token ids are whole numbers with spaces between them, as 5 6 7 8."
        )
        box.fill("5 6 7 8")
        box.press("Enter")
        expect(page.locator("#result")).to_contain_text("the first after")
        assert all(each.isdigit() for each in page.locator("#log .answer").inner_text().split())


def test_a_key_is_asked_for_kept_and_sent(browser: Browser) -> None:
    with (
        served(config=ServerConfig(port=0, api_key="secret")) as server,
        opened(browser, server, PHONE) as page,
    ):
        key = page.get_by_label("API key")
        expect(key).to_be_focused()
        key.fill("wrong")
        key.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("The server refused that key.")
        key.fill("secret")
        key.press("Enter")
        expect(page.locator("#status")).to_have_text("ready")
        page.reload()
        expect(page.locator("#status")).to_have_text("ready")
        send(page, "abc", most=2)
        expect(page.locator("#result")).to_contain_text("2 tokens")
        page.get_by_role("button", name="Forget the API key").click()
        expect(key).to_be_visible()


def test_a_server_that_went_away_is_told_and_comes_back(browser: Browser, server: Served) -> None:
    with opened(browser, server) as page:
        expect(page.locator("#status")).to_have_text("ready")
        page.route("**/live", lambda route: route.fulfill(status=500))
        expect(page.locator("#status")).to_have_text("no connection, trying again")
        page.unroute("**/live")
        expect(page.locator("#status")).to_have_text("ready", timeout=10_000)


@pytest.mark.parametrize("width", [308, 840])
def test_a_map_of_any_pool_fits_and_its_cells_can_be_seen(browser: Browser, server: Served, width: int) -> None:
    with opened(browser, server) as page:
        for blocks in (1, 64, 1000, 5000, 100_000, 3_000_000):
            grid = page.evaluate("([blocks, width]) => layout(blocks, width)", [blocks, width])
            assert grid["size"] >= 4
            assert grid["columns"] * grid["size"] <= width
            assert -(-grid["cells"] // grid["columns"]) * grid["size"] <= 320
            assert grid["cells"] == -(-blocks // grid["per"])
            assert grid["per"] == 1 or blocks > 5000 * width // 840
