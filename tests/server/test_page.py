"""The live page in a headless Chromium: what features/live_page.feature does not tell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.browser import DESK, WATCHED_S, chromium, opened, paced_executor, says, send
from tests.support.pools import sharing_pool
from tests.support.serving import PacedExecutor, Served, served, wait_until_empty

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PHONE = (360, 740)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def pace() -> PacedExecutor:
    return paced_executor()


@pytest.fixture(scope="module")
def server(pace: PacedExecutor) -> Iterator[Served]:
    with served(pool=sharing_pool(), executor=pace) as found:
        yield found


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "dark"), (DESK, "light")], ids=["phone", "desk"])
def test_everything_fits_and_every_text_can_be_read(
    browser: Browser, server: Served, pace: PacedExecutor, size: tuple[int, int], scheme: Any
) -> None:
    pace.least_s = WATCHED_S
    with opened(browser, server.url, size, color_scheme=scheme) as page:
        send(page, "abcdefgh", most=20)
        says(page, "#rows tr", "decode")
        pace.least_s = 0
        says(page, "#result", "20 tokens")
        assert page.evaluate("document.documentElement.scrollWidth") == size[0]
        assert page.evaluate(CONTRAST) == []
    wait_until_empty(server.serving)


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


def test_what_people_and_models_write_stays_text(browser: Browser, server: Served) -> None:
    hostile = "<img src=x onerror=alert(1)><b>bold</b>"
    with opened(browser, server.url) as page:
        send(page, hostile, most=1)
        says(page, "#result", "1 token")
        assert page.locator("#log .user").inner_text() == hostile
        assert page.locator("#log img, #log b").count() == 0


def test_what_is_typed_before_the_server_answers_is_kept(browser: Browser, server: Served) -> None:
    with opened(browser, server.url) as page:
        says(page, "#status", "ready")
        usual = page.get_by_label("Max tokens").input_value()
        page.evaluate("() => { delete $('try').dataset.takes; showPrompt(); }")
        assert page.get_by_label("Max tokens").input_value() == usual
        page.get_by_label("Max tokens").fill("3")
        page.evaluate("() => { delete $('try').dataset.takes; showPrompt(); }")
        assert page.get_by_label("Max tokens").input_value() == "3"


@pytest.mark.parametrize("width", [308, 840])
def test_a_map_of_any_pool_fits_and_its_cells_can_be_seen(browser: Browser, server: Served, width: int) -> None:
    with opened(browser, server.url) as page:
        for blocks in (1, 64, 1000, 5000, 100_000, 3_000_000):
            grid = page.evaluate("([blocks, width]) => layout(blocks, width)", [blocks, width])
            assert grid["size"] >= 4
            assert grid["columns"] * grid["size"] <= width
            assert -(-grid["cells"] // grid["columns"]) * grid["size"] <= 320
            assert grid["cells"] == -(-blocks // grid["per"])
            assert grid["per"] == 1 or blocks > 5000 * width // 840


def test_a_cell_of_several_blocks_has_the_colour_of_most_and_is_paler_where_fewer_are_in_use(
    browser: Browser, server: Served
) -> None:
    with opened(browser, server.url) as page:
        says(page, "#status", "ready")
        found = page.evaluate(
            """() => {
              map = Uint8Array.from([4, 4, 5, 4, 0, 0, 5, 0, 0, 0, 0, 0, 1, 1, 1, 1]);
              grid = {size: 4, columns: 4, per: 4, cells: 4};
              const colours = [[255, 255, 255], [200, 200, 200], [0, 0, 0], [0, 0, 0], [100, 0, 0], [0, 100, 0]];
              const image = (wanted) => [...dots(colours, wanted).getContext("2d").getImageData(0, 0, 4, 1).data];
              return {free: rgb(colour("--edge")), all: image(-1), one: image(5)};
            }"""
        )
    cells = [found["all"][at : at + 4] for at in range(0, 16, 4)]
    assert cells[0] == [100, 0, 0, 255]
    pale = [0.35 * holder + 0.65 * free for holder, free in zip([0, 100, 0], found["free"], strict=True)]
    assert cells[1][:3] == pytest.approx(pale, abs=1)
    assert cells[2] == [*found["free"], 255]
    assert cells[3] == [200, 200, 200, 255]
    assert found["one"][3::4] == [255, 255, 51, 51]  # where the request of 5 has no block, a cell is faint
