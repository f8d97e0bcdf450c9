"""Steps about a simulated server's pace."""

from __future__ import annotations

from contextlib import ExitStack

import httpx2 as httpx
import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.smollm2 import Client
from kvlab.cli.compose import compose_run
from kvlab.config.server import ServerConfig
from kvlab.engine import clock
from kvlab.server.build import build_serving
from tests.support.serving import running


class Waiting:
    """Time in place of the module, for one clock: it passes where somebody sleeps, at once."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def perf_counter(self) -> float:
        return self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


@given(
    parsers.parse("a client of a server of Qwen3 8B on a simulated H200, with server.time_factor={factor:g}"),
    target_fixture="client",
)
def simulated(opened: ExitStack, factor: float) -> Client:
    settings = ("model=qwen3_8b", "executor=simulated", "executor.timing=roofline", "hardware=h200_sxm")
    config = compose_run((*settings, "kv.num_blocks=100")).config
    serving = build_serving(config, ServerConfig(port=0, time_factor=factor))
    return opened.enter_context(Client(opened.enter_context(running(serving))))


@given(
    parsers.parse(
        "a client of a server of Qwen3 8B on a simulated H200, with server.time_factor={factor:g}, whose waiting "
        "is counted"
    ),
    target_fixture="client",
)
def simulated_and_counted(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch, waiting: Waiting, factor: float
) -> Client:
    monkeypatch.setattr(clock, "time", waiting)
    return simulated(opened, factor)


@when(parsers.parse("it completes {count:d} tokens"), target_fixture="logged")
def completes_many(client: Client, count: int, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    client.ask("completion", {"model": "qwen3_8b", "prompt": [1, 2, 3], "max_tokens": count, "ignore_eos": True})
    return caplog


@then("/stats and the metrics have seconds by which steps began late")
def late_seconds(client: Client) -> None:
    stats = httpx.get(f"{client.served.url}/stats").json()
    assert stats["late_s"] > stats["simulated_s"] > 0
    assert "kvlab:late_seconds_total" in httpx.get(f"{client.served.url}/metrics").text


@then(parsers.parse('the log says "{text}"'))
def log_says(logged: pytest.LogCaptureFixture, text: str) -> None:
    assert sum(text in message for message in logged.messages) == 1


@pytest.fixture
def waiting() -> Waiting:
    """The time of the server's clock."""
    return Waiting()


@when(parsers.parse("it asks for {count:d} tokens"))
def asks_for(client: Client, count: int) -> None:
    fields = {"model": "qwen3_8b", "prompt": [1, 2, 3], "max_tokens": count, "ignore_eos": True}
    assert client.ask("completion", fields).usage.completion_tokens == count


@then(parsers.parse("the server waited as long as {count:d} passes take on an H200, divided by {factor:g}"))
def paced_time(waiting: Waiting, count: int, factor: float) -> None:
    weights, bandwidth = 16.4e9, 4.8e12  # bytes, and bytes per second: each pass reads all weights
    passes = count * weights / bandwidth / factor
    # Beside reading weights a step takes the device's share of its bandwidth and what the framework does.
    assert passes < waiting.slept_s < 1.6 * passes
