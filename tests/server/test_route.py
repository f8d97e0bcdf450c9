"""The proxy before several servers: what features/route.feature does not hold."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx2 as httpx
import pytest
from aiohttp import web

from features.steps.route_steps import Routed, prompt, proxy_before
from features.steps.upstream import listening
from kvlab.cli import route
from kvlab.config.fleet import FleetConfig
from kvlab.core import Request, SamplingParams
from kvlab.errors import ConfigError, WorkloadError
from kvlab.fleet.base import Choice, ReplicaView, RoutedRequest, Router
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.fleet.routers import ROUTERS
from kvlab.server.decisions import replay
from kvlab.server.lookout import Lookout, RouteSettings
from kvlab.server.passing import client_session
from kvlab.server.route import Proxy
from kvlab.server.routed_call import RoutedCall, asked_of
from tests.support.commands import call
from tests.support.endpoint import endpoint
from tests.support.serving import wait_until

HEAD = {"kvlab": "decisions", "seed": 0, "fleet": {"router": "round_robin"}}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def saying(stack: ExitStack, status: int, asked: list[str]) -> str:
    """The address of a server that answers every call with this status, and 0 not at all."""

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if not status:
            assert request.transport is not None
            request.transport.abort()
        return web.Response(status=status or 200, text=f"it is {status}")

    async def ready(request: web.Request) -> web.Response:
        return web.Response(status=200 if request.path == "/health" else 404)

    app = web.Application()
    for path in ("/health", "/metrics", "/v1/models"):
        app.router.add_get(path, ready)
    app.router.add_route("*", "/{path:.*}", answer)
    return stack.enter_context(listening(app))


def test_a_server_that_refuses_is_passed_over_unless_it_is_the_last(stack: ExitStack) -> None:
    """503 says that nothing was begun."""
    asked: list[list[str]] = [[], []]
    busy, well = saying(stack, 503, asked[0]), saying(stack, 200, asked[1])
    url = proxy_before(stack, [busy, well])
    answers = [httpx.post(f"{url}/v1/completions", json={"prompt": "a"}) for _ in range(2)]
    assert [answer.text for answer in answers] == ["it is 200"] * 2
    url = proxy_before(stack, [busy])
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).text == "it is 503"
    assert list(map(len, asked)) == [3, 2]


def test_a_call_without_a_prompt_is_not_made_twice(stack: ExitStack) -> None:
    """It may have done something; one that was not reached has not."""
    asked: list[list[str]] = [[], []]
    url = proxy_before(stack, [saying(stack, 0, asked[0]), saying(stack, 200, asked[1])])
    answer = httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "a"})
    assert (answer.status_code, asked) == (502, [["/v1/load_lora_adapter"], []])
    with endpoint() as dead:
        url = proxy_before(stack, [dead.url, saying(stack, 200, asked[1])], "health_s=100")
    assert httpx.get(f"{url}/v1/models/x").text == "it is 200"


def test_a_head_without_a_body_is_no_first_byte(stack: ExitStack) -> None:
    """The client has got nothing yet, and gets its answer from another server."""
    hanging, well = (stack.enter_context(endpoint(usage="none")) for _ in range(2))
    hanging.script.after, hanging.script.then = 0, "hang"
    routed = Routed(proxy_before(stack, [hanging.url, well.url]), [hanging, well])
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(routed.ask, prompt("A"))
        wait_until(lambda: routed.counts == [1, 0])
        hanging.loop.call_soon_threadsafe(hanging.stop)
        asking.result(30)
    assert routed.counts == [1, 1]
    assert routed.got[0][0] == 200


def test_who_may_drain_and_what(stack: ExitStack) -> None:
    server = stack.enter_context(endpoint(usage="none"))
    url = proxy_before(stack, [server.url])
    answer = httpx.post(f"{url}/drain?upstream=0", headers={"Origin": "http://a"})
    assert (answer.status_code, "browser" in answer.text) == (403, True)
    for wrong in ("", "?upstream=1", "?upstream=-1", "?upstream=x"):
        answer = httpx.post(f"{url}/drain{wrong}")
        assert (answer.status_code, "/drain?upstream=N, 0 to 0" in answer.text) == (400, True)
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{url}/health").status_code == 200
    httpx.post(f"{url}/drain?upstream=0")
    assert httpx.get(f"{url}/health").status_code == 503
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, "no upstream takes requests" in answer.text) == (503, True)


@pytest.mark.parametrize(
    ("answered", "said"),
    [
        (lambda views: Choice(7), "chose replica 7 for r, of 0"),
        (lambda views: views.pop().index, "has to return a Choice of 0 for r, not 0"),
        (lambda views: views[0].queue, "AttributeError: 'Upstream' object has no attribute 'queue'"),
    ],
)
def test_a_router_that_answers_nothing_of_use(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, answered: Callable[[Any], Any], said: str
) -> None:
    monkeypatch.setattr(ROUTERS, "_entries", dict(ROUTERS._entries))

    @ROUTERS.register("the_dead")
    class Dead(Router):
        def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
            return cast(Choice, answered(replicas)) if request.request_id == "r" else Choice(0)

    server = stack.enter_context(endpoint(usage="none"))
    url = proxy_before(stack, [server.url], "fleet.router=the_dead")
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "r"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == f"fleet.router=the_dead: {said}"
    assert not server.script.bodies


@pytest.mark.parametrize(
    ("answered", "said"),
    [
        (lambda router, views: views[0].queue, "AttributeError: 'Upstream' object has no"),
        (lambda router, views: Choice(7), "chose replica 7"),
        (lambda router, views: router.lowest(views, [float("nan")]), "scores replicas with nan"),
    ],
)
def test_a_router_that_cannot_choose_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, answered: Callable[[Router, Any], Any], said: str
) -> None:
    class Wrong(Router):
        def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView], now: float) -> Choice:
            return cast(Choice, answered(self, replicas))

    monkeypatch.setitem(ROUTERS._entries, "wrong", Wrong)
    lookout = Lookout(RouteSettings(["http://127.0.0.1:9"], FleetConfig(router="wrong")))
    with pytest.raises(ConfigError, match=rf"^fleet\.router=wrong: {said}"):
        lookout._try_out(lookout.upstreams[0])


def test_a_server_that_comes_later_with_another_model_is_left_out(stack: ExitStack) -> None:
    first, second = (stack.enter_context(endpoint(models=[name])) for name in "mn")
    asyncio.run_coroutine_threadsafe(stopped(second), second.loop).result(30)
    routed = Routed(proxy_before(stack, [first.url, second.url]), [first, second])
    assert "Cannot connect" in routed.health()["upstreams"][1]["reason"]
    asyncio.run_coroutine_threadsafe(second.start(), second.loop).result(30)
    wait_until(lambda: "serves n (1000 tokens)" in routed.health()["upstreams"][1]["reason"])
    assert not routed.health()["upstreams"][1]["up"]


def test_a_model_that_all_servers_begin_again_with_is_served(stack: ExitStack) -> None:
    servers = [stack.enter_context(endpoint(models=["m"], usage="none")) for _ in range(2)]
    routed = Routed(proxy_before(stack, [server.url for server in servers]), servers)
    for number, server in enumerate(servers):
        asyncio.run_coroutine_threadsafe(stopped(server), server.loop).result(30)
        wait_until(partial(is_down, routed, number))
        server.script.models = ["n"]
        asyncio.run_coroutine_threadsafe(server.start(), server.loop).result(30)
    wait_until(lambda: all(each["up"] for each in routed.health()["upstreams"]))


async def stopped(server: Any) -> None:
    server.stop()


def is_down(routed: Routed, number: int) -> bool:
    return not routed.health()["upstreams"][number]["up"]


def test_a_server_that_was_down_has_nothing_cached(stack: ExitStack) -> None:
    servers = [stack.enter_context(endpoint(usage="none")) for _ in range(2)]
    proxy = Proxy(RouteSettings([each.url for each in servers], FleetConfig(router="cache_aware"), health_s=0.02))
    asyncio.run(proxy.start())
    routed = Routed(stack.enter_context(listening(proxy.app())), servers)
    routed.ask(prompt("A"))
    assert [upstream.remembered for upstream in proxy.upstreams] == [4, 0]
    asyncio.run_coroutine_threadsafe(stopped(servers[0]), servers[0].loop).result(30)
    wait_until(lambda: not routed.health()["upstreams"][0]["up"])
    asyncio.run_coroutine_threadsafe(servers[0].start(), servers[0].loop).result(30)
    wait_until(lambda: routed.health()["upstreams"][0]["up"])
    assert [upstream.remembered for upstream in proxy.upstreams] == [0, 0]


def test_what_was_heard_of_a_server_ends_with_it(stack: ExitStack) -> None:
    """Not with its successor's first event, before which requests would go there for what it has not."""
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    server, tokens = stack.enter_context(endpoint()), list(range(32))
    settings = RouteSettings(
        [server.url], FleetConfig(router="sticky"), ["tcp://127.0.0.1:9"], "upstream", health_s=0.02
    )
    proxy = Proxy(settings)
    asyncio.run(proxy.start())
    routed = Routed(stack.enter_context(listening(proxy.app())), [server])
    heard = proxy.upstreams[0].heard
    assert heard is not None
    heard._contents.take(0, [0.0, [["BlockStored", [1, 2], None, tokens, 16]]])
    wait_until(lambda: proxy.upstreams[0].cached_tokens(RoutedCall({"prompt": [*tokens, 1]})) == 32)
    asyncio.run_coroutine_threadsafe(stopped(server), server.loop).result(30)
    wait_until(partial(is_down, routed, 0))
    wait_until(lambda: proxy.upstreams[0].cached_tokens(RoutedCall({"prompt": [*tokens, 1]})) == 0)


def test_a_server_without_tls_is_told_from_one_that_is_down(stack: ExitStack) -> None:
    with pytest.raises(ConfigError, match="SSL"):
        proxy_before(stack, [saying(stack, 200, []).replace("http:", "https:")])


def test_queues_are_not_known_of_a_server_without_metrics(stack: ExitStack) -> None:
    server = stack.enter_context(endpoint(has_metrics=False))
    with pytest.raises(ConfigError, match=r"its /metrics, which fleet.router=vllm reads, says 404"):
        proxy_before(stack, [server.url], "fleet.router=vllm")


def test_a_key_of_the_servers_is_for_what_the_proxy_asks_alone(stack: ExitStack) -> None:
    server = stack.enter_context(endpoint(key="sesame", usage="none"))
    with pytest.raises(ConfigError, match=r"reads, says 401; name its key: api_key='\$\{oc.env:NAME\}'"):
        proxy_before(stack, [server.url], "fleet.router=vllm")
    url = proxy_before(stack, [server.url], "fleet.router=vllm api_key=sesame")
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/v1/models").status_code == 401


def test_a_connection_to_a_machine_that_is_gone_breaks_off(stack: ExitStack) -> None:
    async def is_probed(url: str) -> bool:
        async with client_session() as client, client.post(url, json={"max_tokens": 1}) as answer:
            assert answer.connection is not None
            assert answer.connection.transport is not None
            found = answer.connection.transport.get_extra_info("socket")
            return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))

    assert asyncio.run(is_probed(stack.enter_context(endpoint(after=0, then="hang")).url))


def test_a_recording_that_cannot_be_written_stops_no_request(stack: ExitStack, tmp_path: Path) -> None:
    server = stack.enter_context(endpoint(usage="none"))
    proxy = Proxy(RouteSettings([server.url], record=str(tmp_path / "there")))
    asyncio.run(proxy.start())
    log = proxy._log
    assert log is not None
    log._file.close()
    log._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    routed = Routed(stack.enter_context(listening(proxy.app())), [server])
    routed.ask(prompt("A"))
    assert routed.got[0][0] == 200
    found = {"path": str(tmp_path / "there"), "decisions": 0, "lost": 1, "error": "No space left on device"}
    assert routed.health()["record"] == found
    with pytest.raises(ConfigError, match="is there; name another file"):
        asyncio.run(Proxy(RouteSettings([server.url], record=str(tmp_path / "there"))).start())


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no decisions"),
        (['{"kvlab": "trace"}'], "line 1: ValueError: is none that kvlab route recorded"),
        ([json.dumps(HEAD | {"fleet": {"router": "best"}})], "line 1: ConfigError: fleet.router=best"),
        ([json.dumps(HEAD), "[1]"], "line 2: ValueError: not a JSON object"),
        ([json.dumps(HEAD), '{"t": 1}'], "line 2: KeyError: 'views'"),
    ],
)
def test_what_is_no_recording(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "found").write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(WorkloadError, match=message):
        replay(str(tmp_path / "found"))
    assert call(route.main, f"replay={tmp_path / 'found'}").code == 2


def test_a_recording_that_is_not_there_is_named_by_its_key() -> None:
    with pytest.raises(WorkloadError, match=r"^replay=missing\.jsonl: cannot be read: No such file"):
        replay("missing.jsonl")


def test_a_last_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "found").write_text(json.dumps(HEAD) + '\n{"t": 1.0, "vie')
    assert replay(str(tmp_path / "found")) == ("round_robin", 0, [])


def test_keys_are_those_of_a_pool_and_equal_for_equal_beginnings() -> None:
    tokens = list(range(100))
    request = Request("a", tuple(tokens), SamplingParams(max_tokens=1), salt="x")
    by_call = RoutedCall({"prompt": tokens, "cache_salt": "x", "max_tokens": 5})
    assert list(by_call.keys(16)) == list(RoutedPrompt(request, "a").keys(16))
    assert (by_call.prompt_tokens, by_call.output_tokens) == (100, 5)
    assert (
        RoutedCall({"prompt": "text"}, tokens=tokens).keys(16, 2)[:] == RoutedCall({"prompt": tokens}).keys(16)[:2]
    )
    assert by_call.keys(16)[-1] == by_call.keys(16)[5]
    assert len(by_call.keys(16, 4)) == 4
    first = [{"role": "system", "content": "ä" * 100}, {"role": "user", "content": "one"}]
    longer = RoutedCall({"messages": [*first, {"role": "user", "content": "more"}]}).keys(16)
    shorter = RoutedCall({"messages": first}).keys(16)
    assert 0 < len(shorter) - 1 <= sum(a == b for a, b in zip(shorter, longer, strict=False))
    assert RoutedCall({"messages": first, "cache_salt": "x"}).keys(16)[0] != shorter[0]


def test_any_body_is_routed_or_passed_on() -> None:
    for body in (b"", b"\xff", b"[" * 100_000, b"7", b'{"prompt": ""}', b'{"model": "m"}'):
        assert asked_of(body) is None
    for odd in ([2**70], ["a", "b"], [[1, 2], [3]], {"a": 1}, "\ud800", [None], 7):
        found = RoutedCall({"input": odd, "max_tokens": "many", "user": ["me"]})
        assert (found.prompt_tokens > 0, found.output_tokens) == (True, 0)
    assert RoutedCall({"prompt": "a", "user": "me"}).session == RoutedCall({"prompt": "b"}, session="me").session
    assert RoutedCall({"prompt": "a"}, "mine").session == "mine"
