"""KV events over ZeroMQ: their form, numbers, replay, and what cannot be published."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Event

import pytest

from kvlab.cli.compose import compose_run
from kvlab.config.server import ServerConfig
from kvlab.errors import ConfigError
from kvlab.kv.content_log import ContentLog
from kvlab.kv.reset import drop_cached
from kvlab.server.build import build_serving
from kvlab.server.metrics import ServerMetrics
from tests.support.content_listener import ContentListener, findable
from tests.support.engines import drain, make_engine, request
from tests.support.pools import sharing_pool

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from kvlab.server import kv_events
from kvlab.server.kv_events import KVEventPublisher
from tests.support.router import AllBlocksCleared, BlockStored, Router, cached_hashes

ANY = "tcp://127.0.0.1:0"
SIMULATED = ("model=qwen3_tiny", "executor=simulated", "hardware=h200_sxm", "kv.num_blocks=10")


@pytest.fixture
def log() -> ContentLog:
    return ContentLog()


@pytest.fixture
def publisher(log: ContentLog) -> Iterator[KVEventPublisher]:
    found = KVEventPublisher(log, 4, ANY, ANY, "kv@here@tiny")
    yield found
    found.close()


def heard(publisher: KVEventPublisher) -> Router:
    """A router that has asked for all events."""
    router = Router(publisher.endpoint, publisher.replay_endpoint)
    until = time.monotonic() + 10
    while publisher.published + publisher.dropped < publisher._number and time.monotonic() < until:
        time.sleep(0.005)
    for number, payload in router.replayed(0):
        router.take(number, payload)
    router.close()
    return router


def test_a_router_has_the_blocks_of_an_engine_that_evicts_and_preempts(
    log: ContentLog, publisher: KVEventPublisher
) -> None:
    pool = sharing_pool(12)
    pool.allocator.content_log = log
    engine = make_engine(pool)
    for number in range(8):
        engine.add_request(request(f"r{number}", 13, 30, prompt_of="same" if number % 2 else None))
    records = []
    while engine.has_work():
        records.append(engine.step())
        publisher.flush()
    router = heard(publisher)
    assert sum(record.preempted for record in records if record) > 0
    assert router.heard["BlockRemoved"] > 0
    assert router.known == cached_hashes(pool) != set()
    assert {tuple(router.tokens[block]) for block in router.known} == {tokens for _, _, tokens in findable(pool)}


def test_what_vllms_events_have(log: ContentLog, publisher: KVEventPublisher) -> None:
    pool = sharing_pool()
    pool.allocator.content_log = log
    engine = make_engine(pool)
    engine.add_request(request("salted", 12, 1))
    drain(engine)
    slot = pool.allocate_slot(token_ids=list(range(9)), salt="ann")
    pool.view([slot], [9]).advance()
    publisher.flush()
    (batch,) = heard(publisher).batches
    plain, salted = (event for event in batch.events if isinstance(event, BlockStored))
    assert batch.data_parallel_rank == 0
    assert abs(batch.ts - time.time()) < 60
    assert (plain.parent_block_hash, plain.block_size, plain.lora_id, plain.medium) == (None, 4, None, "GPU")
    assert (plain.extra_keys, salted.extra_keys) == (None, [("ann",), None])
    assert salted.token_ids == list(range(8))


def test_a_router_that_comes_late_and_one_that_subscribes(log: ContentLog, publisher: KVEventPublisher) -> None:
    router = Router(publisher.endpoint, publisher.replay_endpoint)
    try:
        while not router.numbers:  # until the subscription has arrived
            log.cleared()
            publisher.flush()
            router.listen(20)
        log.cleared()
        publisher.flush()
        router.listen()
        assert router.numbers == list(range(publisher.published))
        assert router.topics == {b"kv@here@tiny"}
        assert [number for number, _ in router.replayed(publisher.published - 1)] == [publisher.published - 1]
        assert router.replayed(publisher.published) == []
    finally:
        router.close()


def test_a_batch_that_finds_no_room_is_a_gap_in_the_numbers(
    log: ContentLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, send_all = Event(), KVEventPublisher._send_all

    def late(self: KVEventPublisher) -> None:
        released.wait(10)
        send_all(self)

    monkeypatch.setattr(kv_events, "_MOST_WAITING", 2)
    monkeypatch.setattr(KVEventPublisher, "_send_all", late)
    publisher, metrics = KVEventPublisher(log, 4, ANY, ANY), ServerMetrics("tiny")
    metrics.watch_events(publisher)
    try:
        for _ in range(5):
            log.cleared()
            publisher.flush()
        assert publisher.dropped == 3
        released.set()
        while publisher.published < 2:
            time.sleep(0.005)
        log.cleared()
        publisher.flush()
        router = heard(publisher)
        assert router.numbers == [0, 1, 5]
        text = metrics.text().decode()
        assert 'kvlab:kv_events_dropped_total{engine="0",model_name="tiny"} 3.0' in text
        assert 'kvlab:kv_events_published_total{engine="0",model_name="tiny"} 3.0' in text
    finally:
        released.set()
        publisher.close()


def test_a_cache_that_is_dropped_is_cleared(log: ContentLog, publisher: KVEventPublisher) -> None:
    pool = sharing_pool()
    pool.allocator.content_log = log
    engine = make_engine(pool)
    engine.add_request(request("a", 13, 2))
    drain(engine)
    tokens = list(request("b", 8, 1).prompt_token_ids)
    held = pool.allocate_slot(token_ids=tokens)
    pool.view([held], [8]).advance()
    assert drop_cached(pool) == 3
    publisher.flush()
    assert {content for _, _, content in findable(pool)} == {tuple(tokens[:4]), tuple(tokens)}
    pool.free_slot(held)
    assert drop_cached(pool) == 2
    assert pool.audit() == []
    publisher.flush()
    batches = heard(publisher).batches
    assert [type(event) for event in batches[-1].events] == [AllBlocksCleared]


def test_nothing_is_noted_unless_somebody_listens() -> None:
    serving = build_serving(compose_run(SIMULATED).config, ServerConfig(port=0))
    assert serving.events is None
    assert serving.engine.core.pool.allocator.content_log is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"kv_events": "http://x"}, r"server\.kv_events=http://x: is no address of ZeroMQ, such as tcp://"),
        ({"kv_events_replay": ANY}, r"server\.kv_events_replay=\S+: repeats what server\.kv_events publishes"),
        ({"kv_events": "tcp://127.0.0.1"}, r"server\.kv_events=tcp://127\.0\.0\.1: Invalid argument; write tcp://"),
    ],
)
def test_an_address_that_is_none_is_refused(fields: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_serving(compose_run(SIMULATED).config, ServerConfig(port=0, **fields))  # type: ignore[arg-type]


def test_an_address_in_use_is_refused(publisher: KVEventPublisher) -> None:
    with pytest.raises(ConfigError, match=r"server\.kv_events=.*: Address already in use; write"):
        KVEventPublisher(ContentLog(), 4, publisher.endpoint)


def test_without_a_prefix_cache_there_is_nothing_to_tell() -> None:
    config = compose_run([*SIMULATED, "kv.prefix_sharing=false"]).config
    with pytest.raises(ConfigError, match=r"set kv\.backend=paged kv\.prefix_sharing=true"):
        build_serving(config, ServerConfig(port=0, kv_events=ANY))


def test_a_listener_of_the_log_hears_a_reset() -> None:
    pool = sharing_pool()
    listener = ContentListener.to(pool)
    engine = make_engine(pool)
    engine.add_request(request("a", 13, 2))
    drain(engine)
    listener.hear(pool)
    assert listener.contents == findable(pool) != set()
    drop_cached(pool)
    listener.hear(pool)
    assert (listener.contents, listener.heard["Cleared"]) == (set(), 1)
