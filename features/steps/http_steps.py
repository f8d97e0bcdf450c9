"""Steps about what clients of a server of SmolLM2 ask and get."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import openai
import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.smollm2 import Client, Reply, SmolLM2, smollm2_server
from kvlab.core import Request, SamplingParams
from tests.support.serving import wait_until_empty

_KINDS = {"completes": "completion", "chats": "chat"}
#: What clients that ask at once ask.
PROMPTS = (
    "The capital of France is", "One, two, three,", "Why is the sky blue? Because", "Water boils at",
    "Once upon a time", "def fibonacci(n):", "My favourite food is", "The largest planet of the solar system is",
)  # fmt: skip


@dataclass
class Exchange:
    """What was answered in a scenario, the latest last."""

    replies: list[Reply] = field(default_factory=list)
    fields: list[dict[str, Any]] = field(default_factory=list)  # what was asked for
    posted: list[httpx.Response] = field(default_factory=list)
    error: Any = None

    def ask(self, client: Client, kind: str, fields: dict[str, Any]) -> None:
        """Ask, and keep the answer or the error."""
        self.fields.append(fields)
        try:
            self.replies.append(client.ask(kind, fields))
        except openai.APIStatusError as error:
            self.error = error

    @property
    def reply(self) -> Reply:
        assert self.error is None, self.error
        return self.replies[-1]


@pytest.fixture(scope="module")
def loaded() -> Iterator[SmolLM2]:
    """One engine and server for all scenarios."""
    with smollm2_server() as found:
        yield found


@pytest.fixture
def smollm2(loaded: SmolLM2) -> Iterator[SmolLM2]:
    yield loaded
    loaded.settle()


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


@pytest.fixture
def opened(smollm2: SmolLM2) -> Iterator[ExitStack]:
    """Streams and servers that are closed when the scenario is over."""
    with ExitStack() as stack:
        yield stack


@given("a client of a server of SmolLM2", target_fixture="client")
def plain_client(smollm2: SmolLM2) -> Client:
    return smollm2.client


@given(parsers.parse("a pass of the model takes {seconds:g} s"))
def paced(smollm2: SmolLM2, seconds: float) -> None:
    smollm2.pace.least_s = seconds


@when(parsers.re(r"it (?P<verb>completes|chats) (?P<fields>\{.*\})"))
def ask_http(client: Client, exchange: Exchange, verb: str, fields: str) -> None:
    exchange.ask(client, _KINDS[verb], json.loads(fields))


@when(parsers.re(r"it posts (?P<path>/\S+) (?P<body>.*)"))
def post(client: Client, exchange: Exchange, path: str, body: str) -> None:
    content, headers = body.encode().replace(rb"\xff", b"\xff"), {"Content-Type": "application/json"}
    exchange.posted.append(httpx.post(client.served.url + path, content=content, headers=headers, timeout=60))


@when(parsers.re(r"it gets (?P<path>/\S+)"))
def get(client: Client, exchange: Exchange, path: str) -> None:
    exchange.posted.append(httpx.get(client.served.url + path))


@then(parsers.re(r'it gets "(?P<text>.*)"'))
def gets(exchange: Exchange, text: str) -> None:
    assert exchange.reply.text == text


@then(parsers.parse('it gets a text with "{part}"'))
def gets_part(exchange: Exchange, part: str) -> None:
    assert part in exchange.reply.text


@then(parsers.parse('it does not get a text with "{part}"'))
def without(exchange: Exchange, part: str) -> None:
    assert part not in exchange.reply.text


@then(parsers.parse('it does not get "{text}"'))
def gets_not(exchange: Exchange, text: str) -> None:
    assert exchange.reply.text != text


@then(parsers.parse("it gets the texts {texts}"))
def gets_texts(exchange: Exchange, texts: str) -> None:
    assert list(exchange.reply.texts.values()) == json.loads(texts)


@then(parsers.parse("it gets the JSON {body}"))
def gets_json(exchange: Exchange, body: str) -> None:
    assert exchange.posted[-1].json() == json.loads(body)


@then(parsers.parse('the answer ended by "{reason}"'))
def ended_by(exchange: Exchange, reason: str) -> None:
    assert exchange.reply.reasons == {0: [reason]}


@then(parsers.parse("the answer has {count:d} tokens"))
def has_tokens(exchange: Exchange, count: int) -> None:
    assert exchange.reply.usage.completion_tokens == count


@then(
    parsers.parse("the usage has {prompt:d} prompt tokens, {completion:d} completion tokens and {total:d} in total")
)
def usage(exchange: Exchange, prompt: int, completion: int, total: int) -> None:
    found = exchange.reply.usage
    assert (found.prompt_tokens, found.completion_tokens, found.total_tokens) == (prompt, completion, total)


@then("the answers had different numbers of prompt tokens")
def other_prompts(exchange: Exchange) -> None:
    first, second = (reply.usage.prompt_tokens for reply in exchange.replies)
    assert first != second


@then(parsers.parse("the prompt was {prompt} and the answer {answer}"))
def token_ids(exchange: Exchange, prompt: str, answer: str) -> None:
    (choice,) = exchange.reply.choices
    assert (choice.prompt_token_ids, choice.token_ids) == (json.loads(prompt), json.loads(answer))


@then("the prompt had as many tokens as that")
def as_tokenized(exchange: Exchange) -> None:
    assert exchange.reply.usage.prompt_tokens == exchange.posted[-1].json()["count"]


@then(parsers.parse('the server\'s only model is "{name}" with a context of {tokens:d} tokens'))
def models(client: Client, name: str, tokens: int) -> None:
    (model,) = client.sdk.models.list().data
    assert (model.id, model.model_extra) == (name, {"max_model_len": tokens})
    assert client.sdk.models.retrieve(name) == model


@then("both texts are the same")
def same_texts(exchange: Exchange) -> None:
    first, second = (reply.text for reply in exchange.replies)
    assert first == second
    assert first


@then("the texts differ")
def other_texts(exchange: Exchange) -> None:
    first, second = (reply.text for reply in exchange.replies)
    assert first != second


@then(parsers.parse("it gets {count:d} choices that differ"))
def choices_differ(exchange: Exchange, count: int) -> None:
    assert list(exchange.reply.texts) == list(range(count))
    assert len(set(exchange.reply.texts.values())) > 1


@then(parsers.parse('the second text has fewer "{part}" than the first'))
def fewer(exchange: Exchange, part: str) -> None:
    first, second = (reply.text.count(part) for reply in exchange.replies)
    assert second < first


@then("the engine gives the same tokens in process")
def same_in_process(smollm2: SmolLM2, exchange: Exchange) -> None:
    (choice,), fields = exchange.reply.choices, exchange.fields[-1]
    names = {"max_tokens", "temperature", "top_p", "seed"}
    sampling = SamplingParams(**{name: value for name, value in fields.items() if name in names})
    request = Request("in process", tuple(choice.prompt_token_ids), sampling)
    outputs = list(smollm2.serving.engine.generate(request))
    assert [output.token_id for output in outputs] == choice.token_ids
    assert "".join(output.text for output in outputs) == choice.text


@when(parsers.parse("{count:d} clients at once ask for {tokens:d} tokens each"), target_fixture="at_once")
def at_once(client: Client, smollm2: SmolLM2, count: int, tokens: int) -> list[str]:
    def ask_one(prompt: str) -> str:
        return client.ask("completion", {"prompt": prompt, "max_tokens": tokens}).text

    smollm2.records.clear()
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask_one, PROMPTS[:count]))


@then("each gets what it gets alone")
def each_as_alone(client: Client, smollm2: SmolLM2, at_once: list[str]) -> None:
    assert max(record.batch_seqs for record in smollm2.records) > 1
    alone = [client.ask("completion", {"prompt": prompt, "max_tokens": 8}).text for prompt in PROMPTS]
    assert at_once == alone


@then(parsers.parse("{count:d} of its prompt tokens were cached"))
def cached(exchange: Exchange, count: int) -> None:
    assert exchange.reply.usage.prompt_tokens_details.cached_tokens == count, exchange.reply.usage


@when(parsers.parse("it chats for {turns:d} turns"))
def turns(client: Client, exchange: Exchange, turns: int) -> None:
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"This is question number {turn} of a long conversation: why?"})
        exchange.ask(client, "chat", {"messages": messages, "max_tokens": 6, "cache_salt": "turns"})
        messages.append({"role": "assistant", "content": exchange.reply.text})


@then("each turn found all full blocks of the turn before")
def turns_found(exchange: Exchange) -> None:
    for before, after in itertools.pairwise(exchange.replies):
        assert after.usage.prompt_tokens_details.cached_tokens >= before.usage.prompt_tokens // 16 * 16 > 0


@then(parsers.re(r'it is refused with (?P<status>\d+)(?: for (?P<param>\S+))?: "(?P<message>.*)"'))
def refused(exchange: Exchange, status: str, param: str | None, message: str) -> None:
    if exchange.error is not None:
        found, body = exchange.error.status_code, exchange.error.body
    else:
        found, body = exchange.posted[-1].status_code, exchange.posted[-1].json()["error"]
    code = "context_length_exceeded" if "maximum context length" in message else int(status)
    assert (found, body["code"]) == (int(status), code), body
    assert message in body["message"]
    assert "Traceback" not in body["message"]
    assert param is None or body["param"] == (None if param == "null" else param)


@when(parsers.parse("it completes a prompt of {count:d} characters"))
def large_body(client: Client, exchange: Exchange, count: int) -> None:
    exchange.ask(client, "completion", {"prompt": "x" * count})


@when(parsers.parse("it chats with a message of {count:d} words"))
def long_message(client: Client, exchange: Exchange, count: int) -> None:
    exchange.ask(client, "chat", {"messages": [{"role": "user", "content": "word " * count}]})


@when(parsers.re(r"the metrics are read before and after it completes (?P<fields>\{.*\})"), target_fixture="growth")
def metrics_around(client: Client, exchange: Exchange, fields: str) -> dict[str, float]:
    before = _metrics(client)
    exchange.ask(client, "completion", json.loads(fields))
    return {name: value - before.get(name, 0) for name, value in _metrics(client).items()}


@then("these grew by")
def grew(growth: dict[str, float], datatable: list[list[str]]) -> None:
    expected = {name: float(value) for name, value in datatable}
    assert {name: growth[name] for name in expected} == expected


@then("the metrics count it as refused")
def counts_refusals(client: Client) -> None:
    text = httpx.get(f"{client.served.url}/metrics").text
    (count,) = re.findall(r"^vllm:admission_rejections_total\{.*max_num_queued_reqs.*\} (\S+)$", text, re.MULTILINE)
    assert float(count) > 0


def _metrics(client: Client) -> dict[str, float]:
    """Every sample by its name and labels other than the model's and the engine's, once nothing runs."""
    wait_until_empty(client.served.serving)  # an answer's last token is sent before its step has been counted
    text = httpx.get(f"{client.served.url}/metrics").text.replace('engine="0",', "")
    rows = re.findall(r"^(\w\S*?)\{(\S*?),?model_name=\"\w+\"\} (\S+)$", text, re.MULTILINE)
    return {name + (f"{{{labels}}}" if labels else ""): float(value) for name, labels, value in rows}


@then("/stats has kv_usage_percent 0, fragmentation_percent 0, evictions and blocks_allocated_per_s above 0")
def memory_figures(client: Client) -> None:
    stats = httpx.get(f"{client.served.url}/stats").json()
    assert (stats["kv_usage_percent"], stats["fragmentation_percent"]) == (0, 0)  # nothing runs any more
    assert stats["blocks_allocated"] == stats["blocks_freed"] > 0
    assert stats["evictions"] >= 0
    assert stats["blocks_allocated_per_s"] > 0


@then("/stats, /version, /docs and /openapi.json are answered")
def documents(client: Client) -> None:
    stats, version, docs, document = (
        httpx.get(f"{client.served.url}/{path}") for path in ("stats", "version", "docs", "openapi.json")
    )
    assert stats.json()["blocks_total"] == 160
    assert re.fullmatch(r"\d+\.\d+\S*", version.json()["version"])
    assert docs.headers["content-type"].startswith("text/html")
    assert {"/v1/completions", "/v1/chat/completions"} <= set(document.json()["paths"])


@then(parsers.parse("/health is answered within one pass"))
def health_at_once(client: Client, smollm2: SmolLM2) -> None:
    start = time.monotonic()
    assert httpx.get(f"{client.served.url}/health").json() == {"status": "ready"}
    assert time.monotonic() - start < smollm2.pace.least_s
