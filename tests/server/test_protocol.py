"""Edges of the protocol and of the limits; features/server.feature has what a client sees of them."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest

from kvlab.config.server import ServerConfig
from kvlab.engine.executors.torch import TorchExecutor
from kvlab.engine.sampler import Sampler
from kvlab.kv.eviction import LruEviction
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.kv.retention import Limits, Retention
from kvlab.server.model import ServedModel
from tests.support.engines import assert_empty
from tests.support.model import tiny_decoder
from tests.support.pools import BLOCK_SIZE, NUM_BLOCKS, sharing_pool
from tests.support.serving import PacedExecutor, Served, served, wait_until, wait_until_empty

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found
        assert_empty(found.serving.engine.core)


def post(server: Served, path: str, body: object, content_type: str = "application/json") -> httpx.Response:
    headers = {"Content-Type": content_type}
    return httpx.post(server.url + path, content=json.dumps(body).encode(), headers=headers, timeout=30)


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("completions", {"prompt": [[]]}, "an empty prompt", "prompt"),
        ("completions", {"prompt": [1], "cache_salt": "x" * 1025}, "1,025 characters; at most 1024", "cache_salt"),
        ("completions", {"prompt": [[1]] * 129}, "prompt has 129 prompts: at most 128", "prompt"),
        (
            "chat/completions",
            {"messages": [{"role": "function", "content": "x"}]},
            "the template knows no such role",
            "messages",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
            "messages[0].content has a part that is no text",
            "messages",
        ),
    ],
)
def test_a_mistake_is_one_sentence(server: Served, path: str, body: Any, message: str, param: str) -> None:
    response = post(server, f"/v1/{path}", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_a_web_page_that_posts_a_form_is_refused(server: Served) -> None:
    """A browser lets any page send plain text to this machine, without asking."""
    response = post(server, "/v1/completions", {"prompt": PROMPT}, "text/plain")
    assert response.status_code == 415
    assert "send it with Content-Type: application/json" in response.json()["error"]["message"]


def test_a_bug_of_the_server_is_an_error_too(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(ServedModel, "encode", fail)
    response = post(server, "/v1/completions", {"prompt": "a"})
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the server failed: ZeroDivisionError"


def test_ids_without_text_are_refused(server: Served) -> None:
    assert post(server, "/detokenize", {"tokens": [10**9]}).status_code == 400
    assert post(server, "/tokenize", {}).json()["error"]["message"] == "needs either prompt or messages"


def test_the_documents_name_no_status_that_is_not_answered(server: Served) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"].values()
    statuses = {status for path in paths for each in path.values() for status in each["responses"]}
    assert "422" not in statuses


def test_a_compressed_body_is_refused(server: Served) -> None:
    url, headers = f"{server.url}/v1/completions", {"Content-Encoding": "gzip"}
    response = httpx.post(url, content=gzip.compress(b'{"prompt": [5]}'), headers=headers)
    assert response.status_code == 415
    assert response.json()["error"]["message"] == "Content-Encoding: gzip is not read; send the body as it is"


def test_a_large_body_is_refused_where_its_length_was_not_said() -> None:
    with served(config=ServerConfig(port=0, max_body="1KiB")) as server:
        parts = iter([b'{"prompt": "', b"x" * 2000, b'"}'])
        response = httpx.post(f"{server.url}/v1/completions", content=parts)
    assert response.status_code == 413
    assert response.json()["error"]["message"] == "the body is larger than server.max_body=1KiB"


def test_a_connection_whose_answers_nobody_reads_is_cut() -> None:
    """They are complete, and too small to stop the server from writing them."""
    with served(config=ServerConfig(port=0, keep_alive_s=600)) as server, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        host, port = server.url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        connections = server.server.server_state.connections
        wait_until(lambda: connections)
        connection: Any = next(iter(connections))
        filled = False
        while not filled:
            filled = connection.transport.get_write_buffer_size() > 0
            if filled:  # an idle connection is closed in a second from its next answer on
                connection.timeout_keep_alive = 1
            answered = server.server.server_state.total_requests + 1
            slow.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            wait_until(partial(_has_answered, server, answered))
        wait_until(lambda: not connections)


def _has_answered(server: Served, count: int) -> bool:
    return server.server.server_state.total_requests == count and not server.serving.open_calls


def test_what_drains_for_too_long_is_cut() -> None:
    slow, config = PacedExecutor(TorchExecutor(tiny_decoder(), Sampler())), ServerConfig(port=0, drain_s=0.3)
    slow.least_s = 0.05
    with served(config=config, executor=slow) as server, ThreadPoolExecutor(1) as pool:
        body = {"prompt": PROMPT, "max_tokens": 90, "ignore_eos": True}
        call = pool.submit(post, server, "/v1/completions", body)
        wait_until(server.serving.engine.has_work)
        server.server.handle_exit(15, None)
        assert isinstance(call.exception(60), httpx.RemoteProtocolError | httpx.ReadError)
        wait_until_empty(server.serving)
        assert server.server.cut_calls == 1


def test_a_client_pins_what_its_prompt_begins_with() -> None:
    eviction = Retention(LruEviction, Limits(pinned=2))
    pool = PagedKVCachePool(
        NUM_BLOCKS, BLOCK_SIZE, 96, sharing_pool().storage, prefix_sharing=True, eviction=eviction
    )
    with served(pool=pool) as server:
        prompt = list(range(1, 3 * BLOCK_SIZE))
        body = {"prompt": prompt, "max_tokens": 1, "cache_pin_tokens": 2 * BLOCK_SIZE, "cache_salt": "ann"}
        assert post(server, "/v1/completions", body).status_code == 200
        wait_until(lambda: pool.stats().blocks_pinned == 2)
        wait_until_empty(server.serving)
    assert pool.counters().pins_refused == 0


def test_web_pages_that_are_named_may_call_without_a_key_for_the_question() -> None:
    asked = {"Origin": "https://ui.example", "Access-Control-Request-Method": "POST"}
    with served(config=ServerConfig(port=0, api_key="secret", cors_origins=["https://ui.example"])) as server:
        allowed = httpx.options(f"{server.url}/v1/completions", headers=asked)
        other = httpx.options(f"{server.url}/v1/completions", headers=asked | {"Origin": "https://evil.example"})
        refused = httpx.get(f"{server.url}/v1/models", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "https://ui.example"
    assert "access-control-allow-origin" not in other.headers
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://ui.example")


def test_a_prefix_cache_that_is_reset_has_nothing() -> None:
    prompt = list(range(40))
    with served(pool=sharing_pool(64)) as server:
        for cached in (0, 39):
            usage = post(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1}).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
            wait_until_empty(server.serving)
        assert post(server, "/reset_prefix_cache", {}).json()["dropped_blocks"] >= 10
        usage = post(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
