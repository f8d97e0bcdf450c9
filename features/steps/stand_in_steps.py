"""Steps about servers that stand in for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import httpx2 as httpx
import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.http_steps import Exchange
from features.steps.smollm2 import Client
from kvlab.cli import serve
from kvlab.cli.compose import compose_run
from kvlab.cli.serve import ServeSettings, written_out
from kvlab.cli.settings import read_settings
from kvlab.server.build import build_serving
from tests.support.commands import Command, call
from tests.support.published import smollm2_file
from tests.support.serving import running

STAND_IN = (
    "executor=simulated",
    "executor.timing=roofline",
    "hardware=h100_sxm",
    "server.port=0",
    "server.time_factor=1000",
)
STAND_IN_MODELS = {
    "Llama 3.1 8B": ("model=llama3_1_8b",),
    "a tiny Qwen3": ("model=qwen3_tiny",),
}


@pytest.fixture
def standing() -> Iterator[ExitStack]:
    """Servers and sockets that are closed when the scenario is over."""
    with ExitStack() as stack:
        yield stack


@given(
    parsers.re(
        r"a client of a simulated server of (?P<model>.+?)(?P<lent> with SmolLM2's tokenizer)?"
        r'(?:, with "(?P<settings>.+)")?'
    ),
    target_fixture="client",
)
def stand_in(standing: ExitStack, model: str, lent: str | None, settings: str | None) -> Client:
    tokenizer = (f"model.tokenizer={smollm2_file()}",) if lent else ()
    written = written_out([*STAND_IN, *STAND_IN_MODELS[model], *tokenizer, *([settings] if settings else [])])
    own, overrides = read_settings(ServeSettings, written)
    serving = build_serving(compose_run(overrides).config, own.server)
    return standing.enter_context(Client(standing.enter_context(running(serving))))


@then("the server encodes the text to the same tokens")
def encoded_again(client: Client, exchange: Exchange) -> None:
    reply = exchange.replies[-1]
    again = httpx.post(f"{client.served.url}/tokenize", json={"prompt": reply.text}).json()
    assert again["tokens"] == reply.choices[0].token_ids
    assert again["count"] == 60


@when(parsers.parse('a simulated server is started with "{settings}"'), target_fixture="started")
def start_simulated(settings: str) -> Command:
    return call(serve.main, *STAND_IN, "model=qwen3_tiny", settings)


@when(parsers.parse('a server is started with "{settings}"'), target_fixture="started")
def start(settings: str) -> Command:
    return call(serve.main, "server.port=0", *settings.split())


@then(parsers.parse('the start ends with {code:d} and "{text}"'))
def start_ended(started: Command, code: int, text: str) -> None:
    assert started.code == code
    assert text in started.output


@then(parsers.parse('the metrics have "{name}" with the labels {first} and {second}'))
def labelled(client: Client, name: str, first: str, second: str) -> None:
    lines = httpx.get(f"{client.served.url}/metrics").text.splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}{{"))
    assert first in line
    assert second in line
