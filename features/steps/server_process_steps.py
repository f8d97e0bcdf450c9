"""Steps about a server as a process: signals, drains and ends."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest
from pytest_bdd import given, parsers, then, when

import kvlab.cli.serve
from features.steps.http_limits_steps import SIMULATED
from features.steps.http_steps import Exchange
from kvlab.config.server import ServerConfig
from kvlab.server import lifecycle
from kvlab.server.lifecycle import listen
from tests.support.commands import Command, call
from tests.support.serving import wait_until


class Served:
    """`kvlab serve` in this thread, which gets the signals, and a client of it in another."""

    def __init__(self, tokens: int) -> None:
        self.url = ""  # once it listens
        self.arguments = (*SIMULATED, "server.port=0", "server.time_factor=0.005")
        self.tokens = tokens
        self.received = 0
        self.failure: openai.APIError | httpx.HTTPError | None = None

    def run(self, when_open: Callable[[Served], None]) -> Command:
        """The command, to which `when_open` sends signals once the client has its first token."""
        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr(lifecycle, "listen", self._listen)
            asking = pool.submit(self._ask, when_open)
            ended = call(kvlab.cli.serve.main, *self.arguments)
            asking.result(60)
        return ended

    def _ask(self, when_open: Callable[[Served], None]) -> None:
        wait_until(self._is_ready)
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60) as sdk:
            stream = sdk.completions.create(
                model="smollm2_135m",
                prompt="One",
                max_tokens=self.tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            try:
                for _ in stream:
                    self.received += 1
                    if self.received == 1:
                        when_open(self)
            except (openai.APIError, httpx.HTTPError) as error:
                self.failure = error

    def _listen(self, config: ServerConfig) -> socket.socket:
        listening = listen(config)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        return listening

    def _is_ready(self) -> bool:
        try:
            return bool(self.url) and httpx.get(f"{self.url}/health").status_code == 200
        except httpx.HTTPError:
            return False


def terminate() -> None:
    """Send SIGTERM to this process, in which a command must be waiting for it."""
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)


@given(
    parsers.parse('"kvlab serve" on a slow simulated H200, with a client that has the first of {tokens:d} tokens'),
    target_fixture="command_served",
)
def command_served(tokens: int) -> Served:
    return Served(tokens)


@when("it gets SIGTERM", target_fixture="command")
def one_signal(command_served: Served, exchange: Exchange) -> Command:
    def act(served: Served) -> None:
        terminate()
        wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503)
        exchange.posted.append(httpx.get(f"{served.url}/health"))
        exchange.posted.append(httpx.post(f"{served.url}/v1/completions", json={"prompt": "a"}))

    return command_served.run(act)


@when("it gets SIGTERM twice", target_fixture="command")
def two_signals(command_served: Served) -> Command:
    def act(served: Served) -> None:
        terminate()
        wait_until(lambda: httpx.get(f"{served.url}/health").status_code == 503)
        terminate()

    return command_served.run(act)


@then(parsers.parse('/health says "{status}"'))
def health_says(exchange: Exchange, status: str) -> None:
    assert exchange.posted[0].json() == {"status": status}


@then(parsers.parse("the client gets all {count:d} tokens"))
def all_tokens(command_served: Served, count: int) -> None:
    assert (command_served.received, command_served.failure) == (count, None)


@then("the client's answer breaks off")
def breaks_off(command_served: Served) -> None:
    assert command_served.received < command_served.tokens


@then(parsers.parse("the server's command ends with {code:d}"))
def serve_ends(command: Command, code: int) -> None:
    assert command.code == code, command.output
    assert "Traceback" not in command.output
