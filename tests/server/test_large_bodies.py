"""Bodies that take long: the server goes on beside them, and they mean what they would mean if they were small."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from kvlab.models.tokenizer import Tokenizer
from kvlab.server.reading import LARGE
from tests.support.serving import Letters, Served, served

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGE = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
PAD = {"pad": "x" * LARGE}  # a field that nobody knows


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found


def post(server: Served, path: str, body: bytes) -> httpx.Response:
    return httpx.post(server.url + path, content=body, headers={"Content-Type": "application/json"}, timeout=60)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "abc", "max_tokens": 3, "temperature": 0, "logit_bias": {"5": 1}}),
        (COMPLETIONS, {"prompt": ["abc", "d"], "max_tokens": 3, "temperature": 0, "stop": ["z"]}),
        (COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 3, "temperature": 0, "echo": True}),
        (CHATS, {"messages": [MESSAGE], "max_tokens": 3, "temperature": 0}),
        (
            CHATS,
            {"messages": [{"role": "tool", "content": [{"type": "text", "text": "\ud83d"}]}], "temperature": 0},
        ),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 3, "temperature": 0}),
        ("/v1/responses", {"input": [MESSAGE], "max_output_tokens": 3, "top_logprobs": 1, "temperature": 0}),
        ("/v1/responses", {"input": "abc", "previous_response_id": "a"}),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 6, "ignore_eos": True, "seed": 4, "stop": "z"}),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 3, "n": 2, "messages": [], "temperature": 0}),
        ("/v1/responses", {"input": "abc", "stop": 5}),
        ("/v1/responses", {"input": "abc", "text": {"format": "json"}}),
        (COMPLETIONS, {"prompt": "abcd", "truncate_prompt_tokens": 2, "bad_words": ["a"], "temperature": 0}),
        (CHATS, {"messages": [MESSAGE], "chat_template_kwargs": {"a": [1]}, "max_tokens": 3, "temperature": 0}),
        ("/tokenize", {"prompt": "abc"}),
        ("/tokenize", {"messages": [MESSAGE]}),
        ("/detokenize", {"tokens": [97, 98]}),
        (COMPLETIONS, {"prompt": 7}),
        (COMPLETIONS, {"max_tokens": 7}),
        (COMPLETIONS, {"prompt": [1, "a"]}),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "9"}),
        (COMPLETIONS, {"prompt": "a", "tools": [{}]}),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": 7}}),
        (CHATS, {"messages": []}),
        (CHATS, {"messages": [MESSAGE], "tools": [TOOL], "tool_choice": {"function": {"name": ["f"]}}}),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ],
)
def test_a_large_body_is_answered_as_a_small_one(server: Served, path: str, body: dict[str, Any]) -> None:
    small, large = (post(server, path, json.dumps(each).encode()) for each in (body, body | PAD))
    answers = [small.json(), large.json()]
    for answer in answers:
        for name in ("id", "created", "created_at"):
            answer.pop(name, None)
        for item in answer.get("output", ()):
            item.pop("id")
    assert large.status_code == small.status_code < 500
    assert answers[0] == answers[1]


def test_a_field_that_nobody_knows_is_logged_once(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    for body in ({"never_heard_of_a": 1}, {"never_heard_of_a": 2} | PAD, {"never_heard_of_b": 1} | PAD):
        post(server, COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 1} | body).encode())
    named = [record.getMessage() for record in caplog.records if "never_heard_of" in record.getMessage()]
    assert named == [f"the field 'never_heard_of_{name}' of requests is not known, and ignored" for name in "ab"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            COMPLETIONS,
            b'{"prompt":[' + b"1," * LARGE + b"1]}",
            f"context length is 96 tokens. However, you sent {LARGE + 1}",
        ),
        (COMPLETIONS, b'{"prompt":[' + b"[1]," * LARGE + b"[1]]}", f"prompt has {LARGE + 1} prompts: at most 128"),
        (COMPLETIONS, b'{"prompt":"' + b"a" * LARGE + b'"}', "context length is 96 tokens. However, you sent more"),
        (COMPLETIONS, b'{"prompt":[' + b"1.5," * LARGE + b"1.5]}", "prompt: Input should be a valid"),
        (
            COMPLETIONS,
            b'{"prompt":"a","stop":[' + b'"a",' * LARGE + b'"a"]}',
            f"stop has {LARGE + 1} entries; at most 16",
        ),
        (CHATS, json.dumps({"messages": [MESSAGE] * LARGE}).encode(), f"messages has {LARGE} entries; at most"),
        ("/detokenize", b'{"tokens":[' + b"1," * LARGE + b"1]}", f"you sent {LARGE + 1} tokens in tokens"),
        (COMPLETIONS, b"[" * 10 * LARGE, "the body is no JSON object: maximum recursion depth"),
        (COMPLETIONS, b'{"prompt":"' + b"\xff" * LARGE + b'"}', "the body is no JSON object: it is not UTF-8"),
        (COMPLETIONS, b'{"prompt":"' + b"a" * LARGE, "the body is no JSON object: Unterminated string"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_said(server: Served, path: str, body: bytes, message: str) -> None:
    answer = post(server, path, body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_a_body_that_its_process_cannot_hold_ends_that_alone(server: Served) -> None:
    nested = b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":""' % number for number in range(600_000)) + b"}}"
    assert (
        "the body cannot be read: it takes more than"
        in post(server, COMPLETIONS, nested).json()["error"]["message"]
    )
    body = {"prompt": "abc", "max_tokens": 1} | PAD
    assert post(server, COMPLETIONS, json.dumps(body).encode()).status_code == 200


@pytest.mark.parametrize("what", ["a body that is read", "a text that is encoded", "a chat that is rendered"])
def test_the_server_answers_meanwhile(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    begun, over = threading.Event(), threading.Event()

    def held(call: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*arguments: Any, **options: Any) -> Any:
            begun.set()
            assert over.wait(60)
            return call(*arguments, **options)

        return waits

    with served() as server, ThreadPoolExecutor(1) as pool:
        large, tokenizer = server.serving.large, server.serving.model.tokenizer
        assert isinstance(tokenizer, Tokenizer)
        path, body = COMPLETIONS, json.dumps({"prompt": "abc", "max_tokens": 2} | PAD).encode()
        if what == "a body that is read":
            monkeypatch.setattr(large._process, "ask", held(large._process.ask))
        elif what == "a text that is encoded":
            monkeypatch.setattr(tokenizer, "encode", held(tokenizer.encode))
        else:
            monkeypatch.setattr(tokenizer, "render", held(tokenizer.render))
            path, body = CHATS, json.dumps({"messages": [MESSAGE], "max_tokens": 2}).encode()
        answer = pool.submit(post, server, path, body)
        try:
            assert begun.wait(60)
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
            assert post(server, COMPLETIONS, b'{"prompt": [1, 2], "max_tokens": 2}').status_code == 200
            assert not answer.done()
        finally:
            over.set()
        assert answer.result(60).status_code == 200


def test_a_text_that_is_far_too_long_is_not_encoded_to_its_end(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0
    encode = Letters.encode

    def measured(self: Letters, text: str) -> list[int]:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text)

    monkeypatch.setattr(Letters, "encode", measured)
    answer = post(server, COMPLETIONS, json.dumps({"prompt": "a" * 10**6}).encode())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert 0 < longest < 10**4
    answer = post(server, "/tokenize", json.dumps({"prompt": "a" * 10**6}).encode())
    assert answer.json() == {"tokens": [97] * 10**6, "count": 10**6, "max_model_len": 96}
