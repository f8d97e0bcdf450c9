"""Content that leaves the pool for host memory and comes back: tokens are those of a pool that evicts nothing."""

from __future__ import annotations

import random

import pytest

from kvlab.attention.registry import select_backend
from kvlab.core import FinishReason, SequenceStatus
from kvlab.engine.core import EngineCore
from kvlab.engine.executors.torch import TorchExecutor
from kvlab.engine.sampler import Sampler
from kvlab.models.config import attention_specs
from tests.engine.service_loop import wait_until
from tests.support.engines import drain, make_engine, request, run, step_until
from tests.support.model import expected_tokens, tiny_config, tiny_decoder
from tests.support.tiers import SlowStore, tier_of, tiered_pool

LONG = 40  # tokens of a prompt, of which 36 are in whole blocks that are not run again


def filler(engine: EngineCore, number: int) -> None:
    """Another prompt, which takes the whole pool."""
    run(engine, request(f"filler {number}", 44, 4))


def test_an_evicted_prompt_is_loaded_and_gives_the_same_tokens() -> None:
    engine = make_engine(tiered_pool(12, 64))
    first, again = request("a", LONG, 8), request("again", LONG, 8, prompt_of="a")
    (sequence,) = run(engine, first)
    filler(engine, 1)
    assert engine.pool.prefix_tokens(first.prompt_token_ids) == LONG, "all of it is in the tier"
    (second,) = run(engine, again)
    assert sequence.output_token_ids == second.output_token_ids == expected_tokens(first)
    assert second.cached_tokens == LONG - 1
    counters = engine.pool.counters()
    assert (counters.host_hit_tokens, counters.host_loaded_blocks, counters.hit_tokens) == (LONG, 10, LONG - 1)
    assert counters.store_us
    assert counters.load_us
    assert counters.host_stored_blocks == counters.evicted_blocks
    filler(engine, 2)
    counters = engine.pool.counters()
    assert counters.host_stored_blocks == counters.evicted_blocks - 11, "what came back had not left the tier"


@pytest.mark.parametrize("kv_dtypes", [("int8", "int8"), ("fp8_e4m3", "float32")])
def test_formats_come_back_as_they_left(kv_dtypes: tuple[str, str]) -> None:
    """Numbers and scales, of K and V."""
    spec = tiny_config().kv_spec(*kv_dtypes)
    specs = attention_specs(tiny_config(), "float32", "cpu", kv_dtypes)
    layout = select_backend(specs).layout
    small, large = tiered_pool(12, 64, spec=spec, layout=layout), tiered_pool(64, 1, spec=spec, layout=layout)
    names = ["a", "b", "a", "c", "b", "a"]
    outputs = [
        [
            run(engine, request(f"{name} {turn}", LONG, 8, prompt_of=name))[0].output_token_ids
            for turn, name in enumerate(names)
        ]
        for pool in (small, large)
        for engine in [make_engine(pool, TorchExecutor(tiny_decoder(kv_dtypes[0]), Sampler()))]
    ]
    assert outputs[0] == outputs[1]
    assert list(map(len, outputs[0])) == [8] * len(names)
    assert small.counters().host_hit_tokens == 3 * LONG
    assert large.counters().evicted_blocks == 0


def test_crowded_traffic_with_preemptions_gives_the_tokens_by_the_book() -> None:
    chance, store = random.Random(1), SlowStore()
    engine = make_engine(tiered_pool(22, 6, store), max_batched_tokens=24, admission_reserve=0.0)
    asked = [
        request(f"r{number}", chance.randint(3, LONG), chance.randint(1, 20), prompt_of=f"p{chance.randint(0, 3)}")
        for number in range(30)
    ]
    for sequence in run(engine, *asked):
        assert sequence.output_token_ids == expected_tokens(sequence.request)
    counters = engine.pool.counters()
    assert counters.recompute_hit_tokens
    assert counters.host_hit_tokens
    assert counters.disk_hit_tokens
    assert counters.failed_pages == 0


def test_what_was_done_in_steps_that_only_admit_is_in_the_next_record() -> None:
    engine = make_engine(tiered_pool(12, 64))
    records = []
    for name, prompt in (("a", LONG), ("b", 44), ("a", LONG), ("b", 44)):
        engine.add_request(request(name, prompt, 4))
        records += drain(engine)
    total = engine.pool.counters()
    for counter in (
        "evicted_blocks",
        "host_stored_blocks",
        "host_loaded_blocks",
        "host_hit_tokens",
        "prompt_tokens",
    ):
        found = sum(getattr(record.counters, counter) for record in records)
        assert found == getattr(total, counter) > 0, counter


def test_sequences_that_want_the_same_content_wait_for_one_load() -> None:
    store = SlowStore()
    engine = make_engine(tiered_pool(24, 0, store))
    run(engine, request("a", LONG, 2))
    run(engine, request("filler", 90, 4))
    store.gate.clear()
    sequences = [engine.add_request(request(f"a{n}", LONG, 4, prompt_of="a")) for n in range(3)]
    other = engine.add_request(request("other", 10, 4))
    step_until(engine, lambda: other.finish_reason is FinishReason.LENGTH)
    assert {sequence.status for sequence in sequences} == {SequenceStatus.LOADING}, "others went on"
    assert engine.pool.stats().loading_sequences == 3
    store.gate.set()
    drain(engine)
    for sequence in sequences:
        assert sequence.output_token_ids == expected_tokens(sequence.request)
    counters = engine.pool.counters()
    assert (counters.disk_loaded_blocks, counters.disk_hit_tokens) == (10, 3 * LONG)


@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_a_sequence_that_waits_can_be_aborted_and_the_others_get_their_content(aborted: int) -> None:
    store = SlowStore()
    engine = make_engine(tiered_pool(24, 0, store))
    run(engine, request("a", LONG, 2))
    run(engine, request("filler", 90, 4))
    store.gate.clear()
    asked = [request(f"a{n}", LONG - 8 * n, 4, prompt_of="a") for n in range(3)]
    sequences = [engine.add_request(each) for each in asked]
    engine.step()
    assert engine.abort(f"a{aborted}")
    store.gate.set()
    drain(engine)
    for number, sequence in enumerate(sequences):
        if number != aborted:
            assert sequence.output_token_ids == expected_tokens(sequence.request)


def test_a_page_that_cannot_be_read_is_computed_and_leaves_its_tier() -> None:
    store = SlowStore()
    engine = make_engine(tiered_pool(24, 0, store))
    run(engine, request("a", LONG, 2))
    run(engine, request("filler", 90, 4))
    wait_until(lambda: len(store.pages) == len(tier_of(engine)))  # another thread writes
    broken = list(store.pages)[-5]  # the tail of a prompt is evicted first
    store.broken.add(broken)
    sequences = run(engine, *(request(f"a{n}", LONG, 6, prompt_of="a") for n in range(3)))
    for sequence in sequences:
        assert sequence.output_token_ids == expected_tokens(sequence.request)
    assert 0 < sequences[0].cached_tokens < LONG - 1
    assert engine.pool.counters().failed_pages == 1
    assert broken not in tier_of(engine)


def test_a_page_that_cannot_be_written_is_no_hit() -> None:
    store = SlowStore()
    engine = make_engine(tiered_pool(24, 0, store))
    store.is_full = True
    run(engine, request("a", LONG, 2))
    run(engine, request("filler", 90, 4))
    (sequence,) = run(engine, request("again", LONG, 2, prompt_of="a"))
    assert sequence.output_token_ids == expected_tokens(sequence.request)
    assert engine.pool.counters().disk_hit_tokens == 0
    engine.close()  # whatever was to be written has been tried
    engine.pool.receive(0)
    assert not len(tier_of(engine))


def test_what_an_earlier_process_left_is_found() -> None:
    store = SlowStore()
    engine = make_engine(tiered_pool(24, 0, store))
    run(engine, request("a", LONG, 2))
    run(engine, request("filler", 90, 4))
    engine.close()
    assert store.is_closed
    later = make_engine(tiered_pool(24, 0, SlowStore(store.pages)))
    (sequence,) = run(later, request("again", LONG, 2, prompt_of="a"))
    assert (sequence.cached_tokens, sequence.output_token_ids) == (LONG - 1, expected_tokens(sequence.request))


def test_other_salts_find_nothing() -> None:
    engine = make_engine(tiered_pool(12, 64))
    asked = request("a", LONG, 2)
    run(engine, asked)
    filler(engine, 1)
    assert engine.pool.prefix_tokens(asked.prompt_token_ids) == LONG
    assert engine.pool.prefix_tokens(asked.prompt_token_ids, "tenant") == 0
