"""The server under OpenAI's own client and under plain HTTP."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2 as httpx
import openai
import pytest

from kvlab.config.server import ServerConfig
from tests.support.engines import assert_empty
from tests.support.pools import sharing_pool
from tests.support.serving import Served, served

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found
        assert_empty(found.serving.engine.core)


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def post(server: Served, path: str, body: object) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, headers={"Content-Type": "application/json"})


def events(server: Served, path: str, body: dict[str, Any]) -> list[str]:
    """The data of each event of a stream."""
    response = post(server, path, body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def wait_until_empty(server: Served) -> None:
    """Memory of requests that have ended comes back with the engine's next step."""
    core, deadline = server.serving.engine.core, time.monotonic() + 30
    while core.has_work():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert_empty(core)


def test_a_stream_has_a_chunk_for_each_token_and_ends_as_promised(server: Served) -> None:
    *chunks, done = events(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "temperature": 0})
    assert done == "[DONE]"
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
    assert len(choices) == 5
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["length"]
    whole = post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}).json()
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]


def test_samples_come_interleaved_and_each_ends_once(server: Served) -> None:
    body = {"prompt": [PROMPT, [9, 10]], "n": 3, "max_tokens": 4, "seed": 1, "ignore_eos": True}
    chunks = [json.loads(text) for text in events(server, "/v1/completions", body)[:-1]]
    ends = [choice["index"] for each in chunks for choice in each["choices"] if choice["finish_reason"]]
    assert sorted(ends) == list(range(6))
    indices = [each["choices"][0]["index"] for each in chunks]
    assert indices != sorted(indices)


@pytest.mark.parametrize(
    ("options", "usages"),
    [
        (None, [False] * 3),
        ({"include_usage": True}, [False] * 3 + [True]),
        ({"include_usage": True, "continuous_usage_stats": True}, [True] * 4),
    ],
)
def test_usage_of_streams(server: Served, options: dict[str, bool] | None, usages: list[bool]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "ignore_eos": True, "stream_options": options}
    chunks = [json.loads(text) for text in events(server, "/v1/completions", body)[:-1]]
    assert [bool(chunk.get("usage")) for chunk in chunks] == usages
    if options:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_a_chat_gives_its_role_with_the_first_token(server: Served) -> None:
    body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3, "ignore_eos": True}
    deltas = [json.loads(text)["choices"][0]["delta"] for text in events(server, "/v1/chat/completions", body)[:-1]]
    assert [delta.get("role") for delta in deltas] == ["assistant", None, None]
    assert all(isinstance(delta["content"], str) for delta in deltas)


def test_logprobs_are_parallel_lists_in_completions_and_content_in_chats(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="tiny", prompt="abc", max_tokens=4, logprobs=2, temperature=0)
    found = completion.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens) == completion.choices[0].text
    assert found.text_offset == [0, 1, 2, 3]
    assert [len(top) for top in found.top_logprobs or []] == [2] * 4
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=3, max_tokens=2
    )
    content = chat.choices[0].logprobs
    assert content is not None
    assert [len(entry.top_logprobs) for entry in content.content or []] == [3, 3]


def test_what_was_found_in_the_prefix_cache_is_in_the_usage() -> None:
    with served(pool=sharing_pool()) as server:
        size = server.serving.engine.core.pool.block_size
        body = {"prompt": list(range(20, 20 + 2 * size + 1)), "max_tokens": 1}
        usages = [post(server, "/v1/completions", body).json()["usage"] for _ in range(2)]
        wait_until_empty(server)
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 2 * size]


def test_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="tiny", prompt="abc", echo=True, max_tokens=2, temperature=0)
    assert completion.choices[0].text.startswith("abc")
    assert len(completion.choices[0].text) == 5


def test_token_ids_come_back_where_they_are_asked_for(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2, "return_token_ids": True, "ignore_eos": True}
    (choice,) = post(server, "/v1/completions", body).json()["choices"]
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == 2


def test_fields_that_are_not_known_are_ignored(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "user": "me", "store": True, "tools": [], "best_of": 1}
    assert post(server, "/v1/completions", body).status_code == 200


CHAT = {"messages": [{"role": "user", "content": "x"}]}
WRONG: list[tuple[str, Any, int, str, str | None]] = [
    ("completions", b"{", 400, "the body is no JSON object", None),
    ("completions", b"[1]", 400, "the body is no JSON object", None),
    ("completions", b"\xff{}", 400, "the body", None),
    ("completions", {}, 400, "prompt is missing", "prompt"),
    ("completions", {"prompt": 7}, 400, "prompt=", "prompt"),
    ("completions", {"prompt": []}, 400, "prompt is empty", "prompt"),
    ("completions", {"prompt": [[]]}, 400, "an empty prompt", "prompt"),
    ("completions", {"prompt": [10**6]}, 400, "token id 1000000 is outside the vocabulary", "prompt"),
    ("completions", {"prompt": [[1]] * 129}, 400, "prompt has 129 prompts: at most 128", "prompt"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0; at least 1", "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens='9'", "max_tokens"),
    ("completions", {"prompt": "a", "max_tokens": 10**6}, 400, "can never fit", "max_tokens"),
    ("completions", b'{"prompt": "a", "temperature": NaN}', 400, "temperature=nan", "temperature"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature=-1.0; a number", "temperature"),
    ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs=21: at most 20", "logprobs"),
    ("completions", {"prompt": "a", "logprobs": 1, "echo": True}, 400, "echo=true", "echo"),
    ("completions", {"prompt": "a", "n": 0}, 400, "n=0; at least 1 sample", "n"),
    ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias: keys are token ids", "logit_bias"),
    ("completions", {"prompt": "a", "stop": [""]}, 400, "stop=", "stop"),
    (
        "completions",
        {"prompt": "a", "stream_options": {}},
        400,
        "stream_options needs stream=true",
        "stream_options",
    ),
    ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix='b': is not supported", "suffix"),
    ("completions", {"prompt": "a", "model": "gpt"}, 404, "model='gpt': there is 'tiny'", "model"),
    ("chat/completions", {"messages": []}, 400, "messages=[]", "messages"),
    ("chat/completions", CHAT | {"tools": [{}]}, 400, "tools=[{}]: is not supported", "tools"),
    ("chat/completions", CHAT | {"top_logprobs": 2}, 400, "top_logprobs needs logprobs=true", "top_logprobs"),
    (
        "chat/completions",
        CHAT | {"logprobs": True, "top_logprobs": 21},
        400,
        "top_logprobs=21: from 0 to 20",
        "top_logprobs",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "robot", "content": "x"}]},
        400,
        "the template knows no such role",
        "messages",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content has a part that is no text",
        "messages",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x" * 999}]},
        400,
        "leaves no room",
        "messages",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "message", "param"), WRONG, ids=[row[3][:40] for row in WRONG])
def test_a_mistake_is_one_sentence(
    server: Served, path: str, body: Any, status: int, message: str, param: str | None
) -> None:
    response = post(server, f"/v1/{path}", body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert message in error["message"]
    assert "Traceback" not in error["message"]


def test_an_unknown_path_and_method_have_the_same_shape(server: Served) -> None:
    assert "/nowhere" in httpx.get(f"{server.url}/nowhere").json()["error"]["message"]
    response = httpx.get(f"{server.url}/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_text_to_ids_and_back(server: Served) -> None:
    found = post(server, "/tokenize", {"prompt": "abc"}).json()
    assert (found["tokens"], found["count"]) == ([97, 98, 99], 3)
    assert post(server, "/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "abc"}
    assert post(server, "/detokenize", {"tokens": [10**9]}).status_code == 400
    assert post(server, "/tokenize", {}).json()["error"]["message"] == "needs either prompt or messages"


def test_metrics_count_what_was_served(server: Served, client: openai.OpenAI) -> None:
    def value(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}"))

    before = {
        name: value(name) for name in ("generation_tokens_total", "request_success_total", "prompt_tokens_total")
    }
    client.completions.create(model="tiny", prompt=PROMPT, max_tokens=6, extra_body={"ignore_eos": True})
    assert value("generation_tokens_total") - before["generation_tokens_total"] == 6
    assert value("request_success_total") - before["request_success_total"] == 1
    assert value("prompt_tokens_total") - before["prompt_tokens_total"] == 4
    assert value("num_requests_running") == 0
    assert value("time_to_first_token_seconds_count") > 0


def test_the_documents_name_no_status_that_is_not_answered(server: Served) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    statuses = {
        status for path in document["paths"].values() for each in path.values() for status in each["responses"]
    }
    assert "422" not in statuses
    assert httpx.get(f"{server.url}/docs").status_code == 200


class TestLimits:
    def test_a_key_is_compared_and_health_needs_none(self) -> None:
        with served(config=ServerConfig(port=0, api_key="secret")) as server:
            assert httpx.get(f"{server.url}/health").json() == {"status": "ready"}
            assert httpx.get(f"{server.url}/v1/models").status_code == 401
            wrong = httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer secre"})
            assert wrong.json()["error"]["type"] == "authentication_error"
            assert (
                httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200
            )

    def test_a_large_body_is_refused(self) -> None:
        with served(config=ServerConfig(port=0, max_body="1KiB")) as server:
            response = post(server, "/v1/completions", {"prompt": "x" * 2000})
            assert response.status_code == 413
            assert response.json()["error"]["message"] == "the body is larger than server.max_body=1KiB"

    def test_a_body_that_does_not_come_is_given_up(self) -> None:
        with served(config=ServerConfig(port=0, read_timeout_s=0.2)) as server:
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as slow:
                slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
                slow.settimeout(10)
                assert b"408" in slow.recv(200)

    @pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"])
    def test_a_head_that_does_not_come_is_given_up(self, sent: bytes) -> None:
        with served(config=ServerConfig(port=0, read_timeout_s=0.2)) as server:
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as slow:
                slow.sendall(sent)
                slow.settimeout(10)
                with suppress(ConnectionResetError):
                    assert slow.recv(200) == b""
            assert httpx.get(f"{server.url}/health").status_code == 200

    def test_a_client_that_leaves_gives_its_memory_back(self) -> None:
        with served() as server:
            body = {"prompt": PROMPT, "max_tokens": 90, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                next(response.iter_bytes())
            wait_until_empty(server)

    def test_a_client_that_reads_too_slowly_is_cut(self) -> None:
        with served(config=ServerConfig(port=0, max_waiting_outputs=3)) as server:
            bodies = {"prompt": [PROMPT] * 4, "max_tokens": 20, "ignore_eos": True, "logprobs": 20}
            data = events(server, "/v1/completions", bodies)
            assert "the client reads too slowly: 3 outputs were waiting for it" in data[-2]
            wait_until_empty(server)

    def test_a_full_queue_is_told_and_may_be_tried_again(self) -> None:
        with served(max_batch_size=1, max_waiting_requests=1) as server, ThreadPoolExecutor(8) as pool:
            body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True}
            found = list(pool.map(lambda _: post(server, "/v1/completions", body), range(8)))
            statuses = {response.status_code for response in found}
            assert statuses == {200, 503}
            full = next(response for response in found if response.status_code == 503)
            assert full.headers["retry-after"] == "1"
            assert "scheduler.max_waiting_requests=1 allows no more" in full.json()["error"]["message"]

    def test_a_server_that_drains_ends_what_is_open_and_takes_nothing_new(self) -> None:
        with served() as server, ThreadPoolExecutor(1) as pool:
            body = {"prompt": PROMPT, "max_tokens": 90, "ignore_eos": True, "temperature": 0}
            open_call = pool.submit(post, server, "/v1/completions", body)
            deadline = time.monotonic() + 30
            while not server.serving.engine.core.has_work():
                assert time.monotonic() < deadline
            server.server.handle_exit(15, None)
            health = httpx.get(f"{server.url}/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            assert post(server, "/v1/completions", body).status_code == 503
            assert open_call.result(60).json()["choices"][0]["finish_reason"] == "length"

    def test_a_second_signal_ends_at_once(self) -> None:
        with served() as server:
            server.server.handle_exit(15, None)
            assert not server.server.force_exit
            server.server.handle_exit(15, None)
            assert server.server.should_exit
            assert server.server.force_exit

    def test_a_model_without_words_takes_ids_alone(self) -> None:
        with served(words=False) as server:
            error = post(server, "/v1/completions", {"prompt": "abc"}).json()["error"]
            assert error["message"] == "tiny has no tokenizer: send token ids as prompt to /v1/completions"
            assert post(server, "/v1/completions", {"prompt": PROMPT}).status_code == 200
