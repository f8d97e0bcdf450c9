"""Steps about routers that listen to KV events."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import httpx2 as httpx
import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.smollm2 import Client
from kvlab.cli.compose import compose_run
from kvlab.config.server import ServerConfig
from kvlab.kv.pool import BlockPool
from kvlab.server.build import build_serving
from tests.support.serving import running, wait_until, wait_until_empty

if TYPE_CHECKING:
    from tests.support.router import Router

_KINDS = {
    "simulated": ("executor=simulated", "executor.timing=roofline", "hardware=h100_sxm"),
    "computed": ("executor=cpu", "executor.threads=1"),
}
_ANY = "tcp://127.0.0.1:0"


@given(
    parsers.re(r"a client of a (?P<kind>simulated|computed) server that publishes KV events"),
    target_fixture="client",
)
def publishing(standing: ExitStack, kind: str) -> Client:
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    config = compose_run(["model=qwen3_tiny", "kv.num_blocks=20", *_KINDS[kind]]).config
    serving = build_serving(config, ServerConfig(port=0, kv_events=_ANY, kv_events_replay=_ANY))
    return standing.enter_context(Client(standing.enter_context(running(serving))))


@given(
    parsers.re(
        r"a client of a (?P<kind>simulated|computed) server that publishes KV events, and a router that listens"
    ),
    target_fixture="client",
)
def publishing_to(standing: ExitStack, kind: str, routers: list[Router]) -> Client:
    client = publishing(standing, kind)
    routers.append(router_of(client, standing))
    return client


@pytest.fixture
def routers() -> list[Router]:
    """Those that listen, the latest last."""
    return []


def router_of(client: Client, standing: ExitStack) -> Router:
    from tests.support.router import Router

    events = client.served.serving.events
    assert events is not None
    router = Router(events.endpoint, events.replay_endpoint)
    standing.callback(router.close)
    return router


@when(parsers.parse("{count:d} prompts that begin alike are completed in a cache that has no room for all"))
def complete_many(client: Client, count: int) -> None:
    for number in range(count):
        fields = {"prompt": [7] * 32 + [number] * 40, "max_tokens": 20, "ignore_eos": True}
        assert httpx.post(f"{client.served.url}/v1/completions", json=fields, timeout=60).status_code == 200
    wait_until_empty(client.served.serving)


@when("the prefix cache is reset")
def reset(client: Client) -> None:
    assert client.served.serving.reset_prefix_cache().result(10) > 0


@when(parsers.parse("a router comes, and asks for the events from number {first:d} on"))
def late_router(client: Client, standing: ExitStack, routers: list[Router], first: int) -> None:
    router = router_of(client, standing)
    for number, payload in router.replayed(first):
        router.take(number, payload)
    routers.append(router)


def all_heard(client: Client, router: Router) -> None:
    """Until it has all that was published; what came before its subscription it asks for."""
    events = client.served.serving.events
    assert events is not None

    def complete() -> bool:
        router.listen(20)
        for number, payload in router.replayed(len(router.numbers)):
            router.take(number, payload)
        return len(router.numbers) == events.published == events._number

    wait_until(complete, 10)


@then("the router has heard of blocks that were stored and of blocks that were removed")
def heard_both(client: Client, routers: list[Router]) -> None:
    all_heard(client, routers[-1])
    assert routers[-1].heard["BlockStored"] > 12
    assert routers[-1].heard["BlockRemoved"] > 0


@then("the router has heard that all blocks are cleared")
def heard_cleared(client: Client, routers: list[Router]) -> None:
    all_heard(client, routers[-1])
    assert routers[-1].heard["AllBlocksCleared"] == 1


@then("it knows the blocks that the cache holds, and no others")
def knows_all(client: Client, routers: list[Router]) -> None:
    from tests.support.router import cached_hashes

    pool = client.served.serving.engine.core.pool
    assert isinstance(pool, BlockPool)
    all_heard(client, routers[-1])
    assert routers[-1].known == cached_hashes(pool)
