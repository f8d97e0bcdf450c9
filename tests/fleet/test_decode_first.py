"""Blocks that are reserved where a request decodes, and K and V that are pushed as they are computed."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.config import SchedulerConfig
from kvlab.config.fleet import FleetConfig, LinkConfig
from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.fleet.fleet import Fleet
from kvlab.fleet.transfer import Transfer
from tests.fleet.test_fleet import POOL, fleet_of, serve, traffic
from tests.support.model import prompt_for


def pushing(send: str, *, setup_us: float = 0.0, gb_s: float = 1.0, **settings: Any) -> Fleet:
    link = LinkConfig(gb_s=gb_s, setup_us=setup_us, piece_us=0.0, send=send)
    config = FleetConfig(replicas=2, prefill=1, handshake="decode_first", link=link, **settings)
    return fleet_of(config)


def asked(name: str, tokens: int = 17, at: float = 0.0, *, outputs: int = 3) -> Request:
    return Request(name, prompt_for(name, tokens), SamplingParams(max_tokens=outputs), at)


def tail(fleet: Fleet) -> float:
    """Seconds from the prompt's end until K and V are there, of the only transfer."""
    assert fleet.split is not None
    (sent,) = fleet.split.transfers
    return sent.end_s - sent.ready_s


def test_of_layers_only_the_tail_shows() -> None:
    tails = {}
    for send in ("prompt", "chunk", "layer"):
        fleet = pushing(send, gb_s=1e-3)  # slow, yet no slower than the prompt
        serve(fleet, [asked("r0")])
        tails[send] = tail(fleet)
    assert tails["prompt"] == tails["chunk"]  # one chunk
    assert tails["layer"] < tails["prompt"]
    layer, prompt = pushing("layer", gb_s=1.0), pushing("prompt", gb_s=1.0)
    for fleet in (layer, prompt):
        serve(fleet, [asked("r0")])
    assert tail(layer) == pytest.approx(tail(prompt) / 4)  # of as many layers


def test_every_message_has_its_set_up() -> None:
    tails = []
    for send in ("prompt", "layer"):
        fleet = pushing(send, setup_us=1e6)
        serve(fleet, [asked("r0")])
        tails.append(tail(fleet))
    assert tails[1] > 1.5 * tails[0]


def test_chunks_go_while_later_ones_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POOL, "scheduler", SchedulerConfig(max_batch_size=4, max_batched_tokens=4))
    tails = []
    for send in ("prompt", "chunk"):
        fleet = pushing(send)
        serve(fleet, [asked("r0")])
        tails.append(tail(fleet))
        assert fleet.split is not None
        (sent,) = fleet.split.transfers
        assert (sent.start_s < sent.ready_s) == (send == "chunk")
    assert tails[1] < tails[0] / 2


@pytest.mark.parametrize("send", ["prompt", "chunk"])
def test_of_two_prompts_of_one_step_each_is_there_when_its_own_message_ends(send: str) -> None:
    fleet = pushing(send, setup_us=1e5)
    serve(fleet, [asked("r0"), asked("r1")])
    assert fleet.split is not None
    first, second = fleet.split.transfers
    assert first.end_s == second.start_s


def test_no_prompt_is_computed_before_there_are_blocks_for_it() -> None:
    fleet = pushing("prompt")
    log = serve(fleet, [asked(f"r{n}", 57, outputs=4) for n in range(3)])  # a pool has 40 blocks of 4
    prefills = {each.request_id: each.at_s for each in fleet.routed if each.stage == "prefill"}
    assert [each.at_s for each in fleet.routed if each.stage == "decode"] == [0.0, 0.0, 0.0]
    assert prefills["r0"] == 0.0
    assert prefills["r2"] >= log.records[0].finished_s


def test_both_ends_hold_a_prompt_from_the_reservation_until_it_has_come() -> None:
    fleet = pushing("prompt", setup_us=1e6)
    fleet.submit(asked("r0", 16))
    held = set()
    while fleet.has_work():
        if fleet.step() is None and (when := fleet.next_wakeup()) is not None:
            fleet.clock.wait_until(when)
        assert fleet.audit() == []
        source, target = (replica.core.pool.stats() for replica in fleet.replicas)
        held.add((source.blocks_in_use, target.blocks_in_use, target.loading_sequences))
    assert (0, 4, 1) in held or (0, 5, 1) in held  # reserved, and not asked for
    assert any(source >= 4 and loading for source, _, loading in held)
    assert [replica.core.pool.stats().blocks_in_use for replica in fleet.replicas] == [0, 0]


def test_a_prompt_that_is_cached_where_it_decodes_is_not_sent_away() -> None:
    fleet = pushing("prompt")
    again = Request("r1", prompt_for("r0", 17), SamplingParams(max_tokens=3), 1.0)
    log = serve(fleet, [asked("r0"), again])
    assert [each.request_id for each in fleet.routed if each.stage == "prefill"] == ["r0"]
    assert log.records[1].cached_tokens == 16


@pytest.mark.parametrize("send", ["prompt", "chunk", "layer"])
def test_no_token_changes(send: str) -> None:
    requests = traffic(30)
    whole = serve(fleet_of(FleetConfig(replicas=3)), requests)
    link = LinkConfig(send=send)
    split = serve(
        fleet_of(FleetConfig(replicas=3, prefill=1, handshake="decode_first", link=link, router="precise")),
        requests,
    )
    assert [record.output_token_ids for record in split.records] == [
        record.output_token_ids for record in whole.records
    ]
    assert all(record.replica > 0 for record in split.records)


@pytest.mark.parametrize("seed", range(3))
def test_steps_at_once_change_nothing(seed: int) -> None:
    def run(*, at_once: bool) -> tuple[list[RequestRecord], list[Transfer]]:
        link = LinkConfig(send=("prompt", "chunk", "layer")[seed])
        config = FleetConfig(replicas=4, prefill=2, handshake="decode_first", link=link, router="precise")
        fleet = fleet_of(config, is_open=True)
        log = serve(fleet, traffic(60, seed=seed, gap_s=0.003), at_once=at_once)
        assert fleet.split is not None
        return log.records, fleet.split.transfers

    assert run(at_once=True) == run(at_once=False)


def test_aborted_where_it_waits_it_ends_once_and_others_go_on() -> None:
    fleet = pushing("prompt", setup_us=1e5)
    ended = []
    same = Request("r1", prompt_for("r0", 17), SamplingParams(max_tokens=3), 0.0)
    for request in (asked("r0"), same):
        fleet.submit(
            request, on_finish=lambda record: ended.append((record.request_id, record.finish_reason.value))
        )
    for _ in range(3):
        fleet.step()
    assert fleet.abort("r0")
    while fleet.has_work():
        if fleet.step() is None and (when := fleet.next_wakeup()) is not None:
            fleet.clock.wait_until(when)
        assert fleet.audit() == []
    assert ended == [("r0", "aborted"), ("r1", "length")]
