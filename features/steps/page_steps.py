"""Steps about the live page, seen in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pytest_bdd import given, parsers, then, when

from kvlab.config.server import ServerConfig
from tests.support import browser as chrome
from tests.support.pools import sharing_pool
from tests.support.serving import PacedExecutor, Served, served, wait_until_empty

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@dataclass
class Live:
    """A server, and its page in a browser."""

    server: Served
    page: Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chrome.chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pace() -> PacedExecutor:
    return chrome.paced_executor()


@pytest.fixture(scope="module")
def watched_server(pace: PacedExecutor) -> Iterator[Served]:
    with served(pool=sharing_pool(), executor=pace) as found:
        yield found


@pytest.fixture
def pages() -> Iterator[ExitStack]:
    """What is closed when the scenario has ended."""
    with ExitStack() as found:
        yield found


@given("the live page of a server", target_fixture="live")
def page_of_a_server(browser: Browser, watched_server: Served, pace: PacedExecutor, pages: ExitStack) -> Live:
    pace.least_s = chrome.WATCHED_S
    return Live(watched_server, pages.enter_context(chrome.opened(browser, watched_server.url)))


@given("the live page of a server whose model has no tokenizer", target_fixture="live")
def page_without_words(browser: Browser, pages: ExitStack) -> Live:
    return _page_of(browser, pages, words=False)


@given(parsers.parse('the live page of a server with the key "{key}"'), target_fixture="live")
def page_with_a_key(browser: Browser, pages: ExitStack, key: str) -> Live:
    return _page_of(browser, pages, config=ServerConfig(port=0, api_key=key))


def _page_of(browser: Browser, pages: ExitStack, **server: Any) -> Live:
    found = pages.enter_context(served(**server))
    return Live(found, pages.enter_context(chrome.opened(browser, found.url)))


@when(parsers.parse('I send "{text}" for {tokens:d} tokens'))
def sent(live: Live, text: str, tokens: int) -> None:
    chrome.says(live.page, "#status", "ready")
    chrome.send(live.page, text, tokens)


@given(parsers.parse('I sent "{text}" for {tokens:d} tokens'))
def answered(live: Live, pace: PacedExecutor, text: str, tokens: int) -> None:
    pace.least_s = 0
    sent(live, text, tokens)
    chrome.says(live.page, "#result", f"{tokens} tokens")


@given(parsers.parse('I sent "{text}" for {tokens:d} tokens, and its answer has begun'))
def begun(live: Live, text: str, tokens: int) -> None:
    sent(live, text, tokens)
    chrome.says(live.page, "#decode", "1")


@when(parsers.parse("I send a prompt of {length:d} characters"))
def sent_long(live: Live, length: int) -> None:
    sent(live, "x" * length, 9)


@when(parsers.parse('I press "{what}"'))
def pressed(live: Live, what: str) -> None:
    if what == "Escape":
        live.page.keyboard.press(what)
    else:
        live.page.get_by_role("button", name=what).click()


@when(parsers.parse('I give the key "{key}"'))
def key_given(live: Live, key: str) -> None:
    box = live.page.get_by_label("API key")
    box.wait_for()
    box.fill(key)
    box.press("Enter")


@given("the server does not answer")
def silent(live: Live) -> None:
    live.page.route("**/live", lambda route: route.abort())


@when("the server answers again")
def back(live: Live) -> None:
    live.page.unroute("**/live")


@then("the page lists one request, in decode")
def listed(live: Live) -> None:
    chrome.says(live.page, "#rows tr", "decode")
    chrome.says(live.page, "#decode", "1")
    assert live.page.locator("#rows tr").count() == 1


@then("its blocks are on the map, and pointing at the first says whose it is")
def mapped(live: Live) -> None:
    page = live.page
    name = page.locator("#rows tr .name")
    name.click()
    assert name.get_attribute("aria-pressed") == "true"
    block = page.evaluate("map.indexOf(FIRST)")
    page.locator("#map").focus()
    for _ in range(block + 1):
        page.keyboard.press("ArrowRight")
    chrome.says(page, "#pointed", f"block {block}: {name.inner_text()}")


@then(parsers.parse('at the end the line below the prompt says "{first}" and "{second}"'))
def ended(live: Live, pace: PacedExecutor, first: str, second: str) -> None:
    pace.least_s = 0
    for text in (first, second):
        chrome.says(live.page, "#result", text)


@then("it lists no request, and no block is in use")
def page_lists_nothing(live: Live) -> None:
    chrome.says(live.page, "#listed", "none now")
    chrome.says(live.page, "#legend", "in use 0")
    assert live.page.locator("#rows tr").count() == 0
    wait_until_empty(live.server.serving)


@then(parsers.parse('the line below the prompt says "{text}"'))
def told(live: Live, text: str) -> None:
    chrome.says(live.page, "#result", text)


@then("the pool is empty")
def given_back(live: Live) -> None:
    wait_until_empty(live.server.serving)


@then(parsers.parse('the page says "{text}"'))
def page_says(live: Live, text: str) -> None:
    chrome.says(live.page, "#log .wrong", text)


@then("the prompt is still there")
def prompt_there(live: Live) -> None:
    assert live.page.locator("#prompt").input_value() == "x" * 200


@then("the answer is token ids")
def answer_of_ids(live: Live) -> None:
    ids = live.page.locator("#log .answer").inner_text().split()
    assert [each.isdigit() for each in ids] == [True] * 8


@then("the page says that the server refused it")
def key_refused(live: Live) -> None:
    chrome.says(live.page, "#refused", "The server refused that key.")


@then(parsers.parse('the page says "{text}", and again after it was loaded anew'))
def key_kept(live: Live, text: str) -> None:
    chrome.says(live.page, "#status", text)
    live.page.reload()
    chrome.says(live.page, "#status", text)


@then("the API key can be forgotten")
def key_forgotten(live: Live) -> None:
    live.page.get_by_role("button", name="Forget the API key").click()
    chrome.says(live.page, "#ask", "This server asks for a key")


@then(parsers.parse('the page\'s status is "{text}"'))
def status_is(live: Live, text: str) -> None:
    chrome.says(live.page, "#status", text)
