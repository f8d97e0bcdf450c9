"""Steps about a server under load, clients that misbehave, and the server's beginning and end."""

from __future__ import annotations

import json
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx2 as httpx
import openai
import pytest
from pytest_bdd import given, parsers, then, when

import kvlab.cli.serve
from features.steps.http_steps import Exchange
from features.steps.said import SaidModel, splits
from features.steps.smollm2 import Client, SmolLM2
from kvlab.config.server import ServerConfig
from kvlab.engine.service import Engine
from kvlab.models.tokenizer import Tokenizer
from kvlab.server.model import ServedModel
from kvlab.server.serving import Serving
from tests.support.commands import Command, call
from tests.support.serving import running, serving_of, wait_until, wait_until_empty

SIMULATED = ("model=smollm2_135m", "executor=simulated", "hardware=h200_sxm", "kv.num_blocks=100")


@given(parsers.re(r"a client of a server with (?P<limits>\{.*\})"), target_fixture="client")
@given(
    parsers.re(r'a client of a server with (?P<limits>\{.*\}) that has the key "(?P<key>\w+)"'),
    target_fixture="client",
)
def limited(smollm2: SmolLM2, opened: ExitStack, limits: str, key: str = "none") -> Client:
    serving = Serving(
        smollm2.serving.engine,
        smollm2.serving.model,
        smollm2.serving.metrics,
        ServerConfig(port=0, **json.loads(limits)),
    )
    return opened.enter_context(Client(opened.enter_context(running(serving)), key=key))


@given(parsers.parse("a client of a server whose model has no {lacking}"), target_fixture="client")
def lacking(smollm2: SmolLM2, opened: ExitStack, lacking: str) -> Client:
    serving, model = smollm2.serving, smollm2.serving.model
    assert model.tokenizer is not None
    plain = None if lacking == "tokenizer" else Tokenizer(model.tokenizer._backend, "this model")
    without = ServedModel(model.name, model.max_tokens, model.vocab_size, model.created, plain)
    other = Serving(serving.engine, without, serving.metrics, ServerConfig(port=0))
    return opened.enter_context(Client(opened.enter_context(running(other))))


@given(parsers.parse("a client with an answer of {tokens:d} tokens"))
def one_opened(client: Client, smollm2: SmolLM2, opened: ExitStack, tokens: int) -> None:
    many_opened(client, smollm2, opened, 1, tokens)


@given(parsers.parse("{count:d} clients with answers of {tokens:d} tokens"), target_fixture="streams")
def many_opened(client: Client, smollm2: SmolLM2, opened: ExitStack, count: int, tokens: int) -> list[Any]:
    """Those that find no room in the batch wait."""
    streams, engine, before = [], smollm2.serving.engine, smollm2.serving.open_calls
    for number in range(count):
        fields = {"prompt": "One", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        streams.append(opened.enter_context(client.open("completion", fields)))
        wait_until(partial(_runs, engine, min(before + number + 1, 8)))
    return streams


def _runs(engine: Engine, count: int) -> bool:
    return engine.stats().running >= count


def _waits(engine: Engine, count: int) -> bool:
    return engine.stats().waiting == count


@given(parsers.parse("{count:d} clients with answers of {tokens:d} tokens that leave after {seconds:g} s"))
def opened_and_left(
    client: Client, smollm2: SmolLM2, opened: ExitStack, count: int, tokens: int, seconds: float
) -> None:
    streams = many_opened(client, smollm2, opened, count, tokens)
    leaving = threading.Timer(seconds, lambda: [stream.close() for stream in streams])
    opened.callback(leaving.join)
    leaving.start()


@when(parsers.re(r"it completes (?P<fields>\{.*\}), trying again by itself"))
def ask_again(client: Client, opened: ExitStack, exchange: Exchange, fields: str) -> None:
    exchange.ask(opened.enter_context(Client(client.served, max_retries=3)), "completion", json.loads(fields))


@when(parsers.re(r"it completes (?P<fields>\{.*\}), but leaves after (?P<seconds>\S+) s"))
def ask_and_leave(client: Client, smollm2: SmolLM2, fields: str, seconds: str) -> None:
    smollm2.records.clear()
    with pytest.raises(openai.APITimeoutError):
        client.open("completion", json.loads(fields), timeout=float(seconds))


@then("the header Retry-After is 1")
def retry_after(exchange: Exchange) -> None:
    assert exchange.error.response.headers["Retry-After"] == "1"


@when(parsers.parse("requests of the priorities 2, 1 and 0 come one after the other"), target_fixture="order")
def by_priority(client: Client, smollm2: SmolLM2) -> list[int]:
    done: list[int] = []

    def ask(priority: int) -> None:
        client.ask("completion", {"prompt": "Two", "max_tokens": 2, "priority": priority})
        done.append(priority)

    with ThreadPoolExecutor(3) as pool:
        futures: list[Future[None]] = []
        for number, priority in enumerate((2, 1, 0), 1):
            futures.append(pool.submit(ask, priority))
            wait_until(partial(_waits, smollm2.serving.engine, number))
        smollm2.pace.least_s = 0
        for future in futures:
            future.result()
    return done


@then("those of the priorities 0, 1 and 2 are answered in this order")
def in_order(order: list[int]) -> None:
    assert order == [0, 1, 2]


@when(parsers.parse("one of them leaves after {count:d} tokens"))
def one_leaves(smollm2: SmolLM2, streams: list[Any], count: int) -> None:
    for _ in range(count):
        next(streams[0])
    smollm2.records.clear()
    streams[0].close()


@then("the first step without it has the blocks of the other one alone")
def blocks_of_other(smollm2: SmolLM2) -> None:
    wait_until(lambda: any(record.batch_seqs == 1 for record in smollm2.records))
    record = next(record for record in smollm2.records if record.batch_seqs == 1)
    assert record.pool is not None
    assert (record.pool.sequences, record.running) == (1, 1)
    assert record.pool.blocks_in_use == -(-record.pool.tokens_stored // 16)
    assert smollm2.records.index(record) < 150  # of the 297 steps that the answer would have gone on


@then("all blocks are free before it would have been answered")
def free_early(smollm2: SmolLM2) -> None:
    wait_until_empty(smollm2.serving)
    assert sum(record.sampled_tokens for record in smollm2.records) < 200


@then("no request is waiting")
def none_waiting(smollm2: SmolLM2) -> None:
    wait_until(lambda: smollm2.serving.engine.stats().waiting == 0)
    assert smollm2.serving.engine.stats().running == 8


@when("a client asks for a long stream and reads nothing of it")
def reads_nothing(client: Client, smollm2: SmolLM2, opened: ExitStack) -> None:
    smollm2.records.clear()
    slow = opened.enter_context(socket.socket())
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect(_address(client))
    fields = {"prompt": "One", "n": 8, "max_tokens": 400, "ignore_eos": True, "logprobs": 20, "stream": True}
    slow.sendall(_head("POST /v1/completions", json.dumps(fields)))


@then("its request is aborted, and all blocks are free")
def aborted(client: Client, smollm2: SmolLM2) -> None:
    wait_until(lambda: any(record.running == 8 for record in smollm2.records))
    wait_until_empty(smollm2.serving, 120)
    assert sum(record.sampled_tokens for record in smollm2.records) < 8 * 400 / 2
    wait_until(lambda: not client.served.server.server_state.connections)


@when(parsers.re(r'a client sends "(?P<sent>.*)" and no more', flags=16), target_fixture="sender")
def sends(client: Client, opened: ExitStack, sent: str) -> socket.socket:
    found = opened.enter_context(socket.create_connection(_address(client), timeout=20))
    found.sendall(sent.replace(r"\r", "\r").replace(r"\n", "\n").encode())
    return found


@then("it is cut")
def cut(sender: socket.socket, client: Client) -> None:
    _received(sender)
    assert httpx.get(f"{client.served.url}/health").status_code == 200


@then("it is answered 408")
def answered_408(sender: socket.socket) -> None:
    assert sender.recv(100).startswith(b"HTTP/1.1 408 ")


def _received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    try:
        while data := connection.recv(4096):
            found += data
    except ConnectionResetError:
        pass
    return found


def _address(client: Client) -> tuple[str, int]:
    host, port = client.served.url.removeprefix("http://").split(":")
    return host, int(port)


def _head(line: str, body: str) -> bytes:
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{line} HTTP/1.1\r\n{headers}\r\n\r\n{body}".encode()


@then("without a key /health and /ping are answered")
def health_without_key(client: Client) -> None:
    for path in ("/health", "/ping"):
        assert httpx.get(client.served.url + path).json() == {"status": "ready"}
    assert httpx.get(f"{client.served.url}/v1/models").status_code == 401


@then("without a key its audit, which takes time of the engine, is refused")
def audit_without_key(client: Client) -> None:
    assert httpx.get(f"{client.served.url}/health?audit=true").status_code == 401


@given(
    parsers.re(r'a model that says "(?P<text>.*)" in every split of its characters that the vocabulary has'),
    target_fixture="said",
)
def model_that_says(smollm2: SmolLM2, opened: ExitStack, text: str) -> tuple[Client, SaidModel]:
    tokenizer = smollm2.serving.model.tokenizer
    assert tokenizer is not None
    model = SaidModel(tokenizer, splits(tokenizer, text))
    assert len(model.scripts) > 1
    serving = serving_of(model.engine, "smollm2_135m", model.vocab_size, tokenizer)
    return opened.enter_context(Client(opened.enter_context(running(serving)))), model


@given(parsers.re(r'a model that says "(?P<text>.*)" in parts of characters'), target_fixture="client")
def model_that_says_parts(smollm2: SmolLM2, opened: ExitStack, text: str) -> Client:
    tokenizer = smollm2.serving.model.tokenizer
    assert tokenizer is not None
    script = tokenizer.encode(text)
    assert "\ufffd" in tokenizer.decode(script[:1])
    model = SaidModel(tokenizer, [script])
    serving = serving_of(model.engine, "smollm2_135m", model.vocab_size, tokenizer)
    return opened.enter_context(Client(opened.enter_context(running(serving))))


@when("all of them are streamed")
def stream_all(said: tuple[Client, SaidModel], exchange: Exchange) -> None:
    client, model = said
    longest = max(map(len, model.scripts)) + 1
    prompts = [[1]] * len(model.scripts)
    exchange.ask(client, "completion", {"prompt": prompts, "max_tokens": longest, "stream": True})


@then(parsers.re(r'each joins to "(?P<text>.*)"'))
def each_joins(said: tuple[Client, SaidModel], exchange: Exchange, text: str) -> None:
    assert exchange.reply.texts == dict.fromkeys(range(len(said[1].scripts)), text)


@given(parsers.parse("a model that fails after {count:d} tokens"), target_fixture="client")
def failing(smollm2: SmolLM2, opened: ExitStack, count: int) -> Client:
    tokenizer = smollm2.serving.model.tokenizer
    assert tokenizer is not None
    model = SaidModel(tokenizer, [tokenizer.encode("a")[:1] * count], fails=True)
    serving = serving_of(model.engine, "smollm2_135m", model.vocab_size, tokenizer)
    return opened.enter_context(Client(opened.enter_context(running(serving))))


@when(parsers.re(r"it streams (?P<fields>\{.*\}) to an error"))
def stream_to_error(client: Client, exchange: Exchange, fields: str) -> None:
    try:
        for chunk in client.open("completion", json.loads(fields) | {"stream": True}):
            exchange.fields.append(chunk)
    except openai.APIError as error:
        exchange.error = error


@then(parsers.parse('it got {count:d} chunks and then the error "{message}"'))
def then_error(exchange: Exchange, count: int, message: str) -> None:
    assert len(exchange.fields) == count
    assert message in exchange.error.message


@when('I start "kvlab serve" on the same port', target_fixture="command")
def same_port(client: Client) -> Command:
    return call(kvlab.cli.serve.main, "model=smollm2_135m", f"server.port={_address(client)[1]}")


@then(parsers.parse('it ends with {code:d} and "{message}"'))
def refused_to_start(command: Command, code: int, message: str) -> None:
    assert command.code == code
    assert message in command.output
    assert command.output.count("\n") == 1
