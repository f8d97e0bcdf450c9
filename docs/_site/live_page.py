"""Draw docs/img/live_page.png and live_page_phone.png: serve SmolLM2, keep it busy, and look at its page.

python -m docs._site.live_page
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Literal

import httpx2 as httpx
from playwright.sync_api import ViewportSize

from tests.support.browser import chromium

PICTURES = Path(__file__).resolve().parents[1] / "img"
SETTINGS = ["model=smollm2_135m", "kv.num_blocks=448", "scheduler.max_batch_size=20"]
CLIENTS, PROMPT = 24, "Why is the sky blue?"
SIZES: dict[str, tuple[ViewportSize, Literal["light", "dark"]]] = {
    "live_page": (ViewportSize(width=1280, height=880), "light"),
    "live_page_phone": (ViewportSize(width=360, height=1120), "dark"),
}


def main() -> None:
    """Draw both."""
    command = [sys.executable, "-m", "kvlab.cli", "serve", "server.port=0", *SETTINGS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, chromium() as browser:
        assert server.stdout is not None
        url = next(line for line in server.stdout if "http://" in line).split()[-1]
        for number in range(CLIENTS):
            threading.Thread(target=ask, args=(url, number), daemon=True).start()
        pages = {}
        for name, (size, scheme) in SIZES.items():
            pages[name] = browser.new_context(viewport=size, color_scheme=scheme).new_page()
            pages[name].goto(f"{url}/")
        time.sleep(30)
        for page in pages.values():
            page.get_by_label("Temperature").fill("0")
            page.get_by_label("Message").fill(PROMPT)
            page.get_by_label("Message").press("Enter")
        time.sleep(6)
        for name, page in pages.items():
            page.screenshot(path=PICTURES / f"{name}.png")
        server.kill()


def ask(url: str, number: int) -> None:
    """A client that asks and waits in turn; half of its prompts begin as those of others do."""
    chosen = random.Random(number)
    shared = [[random.Random(seed).randrange(100, 9000) for _ in range(96)] for seed in range(2)]
    while True:
        prompt = (chosen.choice(shared) if chosen.random() < 0.6 else []) + [
            chosen.randrange(100, 9000) for _ in range(chosen.randrange(20, 400))
        ]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": chosen.randrange(30, 300), "ignore_eos": True}
        try:
            httpx.post(f"{url}/v1/completions", json=body, timeout=300)
        except httpx.HTTPError:  # the picture is taken
            return
        time.sleep(chosen.random())


if __name__ == "__main__":
    main()
