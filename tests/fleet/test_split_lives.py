"""Replicas of a split die: what they had is served by others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvlab.config import SchedulerConfig
from kvlab.config.fleet import FleetConfig, LinkConfig
from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.fleet.fleet import Fleet
from kvlab.lab.results.log import RunLog
from tests.fleet.test_fleet import POOL, fleet_of, serve
from tests.support.model import prompt_for

HANDSHAKES = ("prefill_first", "decode_first")
ASKED = Request("r0", prompt_for("r0", 17), SamplingParams(max_tokens=9), 0.0)  # four whole blocks of a prompt
CHUNKS = POOL | {"scheduler": SchedulerConfig(max_batch_size=4, max_batched_tokens=4)}


def split(
    handshake: str,
    *life: str,
    setup_us: float = 0.0,
    own: Mapping[str, Any] = POOL,
    prefill: int = 2,
    decode: int = 2,
    more: Sequence[Request] = (),
    asked: Request = ASKED,
) -> tuple[Fleet, RunLog]:
    """Two replicas that prefill and two that decode serve one request, or others."""
    link = LinkConfig(setup_us=setup_us, send="chunk" if handshake == "decode_first" else "prompt")
    config = FleetConfig(
        replicas=prefill + decode, prefill=prefill, handshake=handshake, life=list(life), link=link
    )
    fleet = fleet_of(config, own=own)
    return fleet, serve(fleet, [asked, *more])


def other(arrival_s: float) -> Request:
    return Request("r1", prompt_for("r1", 17), SamplingParams(max_tokens=9), arrival_s)


def sent_to(fleet: Fleet, stage: str) -> list[int]:
    return [each.choice.replica for each in fleet.routed if each.stage == stage]


@pytest.fixture(scope="module")
def usual() -> RunLog:
    return split("prefill_first")[1]


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_a_prompt_that_was_being_computed_is_computed_by_another(handshake: str, usual: RunLog) -> None:
    ends_s = [step.end_s for step in split(handshake, own=CHUNKS)[1].steps if step.replica == 0]
    fleet, log = split(handshake, f"{ends_s[1]:.9f}:die:0", own=CHUNKS)
    assert sent_to(fleet, "prefill") == [0, 1]
    assert sent_to(fleet, "decode") == [2]
    assert fleet.split is not None
    *parts, sent = fleet.split.transfers
    # Of two chunks one was sent, and the other was about to be.
    assert len(parts) == (handshake == "decode_first")
    for part in parts:
        assert (part.source, part.num_bytes) == (0, sent.num_bytes // 2)
        assert (part.start_s, part.end_s) == pytest.approx((ends_s[0], ends_s[1]))
    assert sent.source == 1
    assert sent.start_s > ends_s[1]  # all of it is sent anew
    assert fleet.retried == 1
    assert log.records[0].output_token_ids == usual.records[0].output_token_ids


TOKENS = POOL | {"scheduler": SchedulerConfig(max_batch_size=4, max_batched_tokens=4, long_prefill_threshold=1)}


@pytest.mark.parametrize(("setup_us", "is_there"), [(0.0, True), (1000.0, False)])
def test_the_rest_of_a_prompt_is_computed_by_another_unless_its_blocks_are_all_there(
    setup_us: float, is_there: bool
) -> None:
    """They are on their way, or there, when their source dies with the last token before it."""
    asked = replace(ASKED, prompt_token_ids=prompt_for("r0", 19))
    ends_s = [step.end_s for step in split("decode_first", own=TOKENS, asked=asked)[1].steps if step.replica == 0]
    die_s = (ends_s[15] + 3 * ends_s[16]) / 4
    fleet, log = split("decode_first", f"{die_s:.9f}:die:0", own=TOKENS, asked=asked, setup_us=setup_us)
    assert fleet.split is not None
    assert sent_to(fleet, "prefill") == ([0] if is_there else [0, 1])
    assert (fleet.retried, fleet.lost_tokens) == ((0, 0) if is_there else (1, 17))
    assert [each.source for each in fleet.split.transfers] == ([0] if is_there else [0, 1])
    first = next(step for step in log.steps if step.replica == 2)
    assert first.start_s >= fleet.split.transfers[-1].end_s
    assert log.records[0].cached_tokens == 0
    assert log.records[0].computed_prompt_tokens == 19


def test_what_was_sent_for_a_request_that_was_aborted_is_kept() -> None:
    link = LinkConfig(setup_us=1e3, send="chunk")
    fleet = fleet_of(FleetConfig(replicas=2, prefill=1, handshake="decode_first", link=link), own=CHUNKS)
    fleet.submit(ASKED)
    while fleet.replicas[0].core.clock.now() < 5e-4:  # three steps have begun, whose messages are planned
        fleet.step()
    assert fleet.abort("r0")
    while fleet.has_work():
        fleet.step()
    assert fleet.split is not None
    (part,) = fleet.split.transfers
    assert part.end_s - part.start_s > 2e-3
    assert part.num_bytes == 6144  # of the three that had begun


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_what_is_on_its_way_from_a_dead_replica_is_computed_where_it_decodes(handshake: str, usual: RunLog) -> None:
    fleet, log = split(handshake, "0.5:die:0", setup_us=1e6)
    assert sent_to(fleet, "prefill") == [0]
    assert sent_to(fleet, "decode") == [2]
    assert fleet.retried == 0
    assert 0.5 < log.records[0].token_times_s[0] < 1.0  # it did not wait for the transfer's end
    assert log.records[0].output_token_ids == usual.records[0].output_token_ids
    assert max(record.prefill_tokens for record in log.steps if record.replica == 2) == 17


@pytest.mark.parametrize("handshake", HANDSHAKES)
@pytest.mark.parametrize("setup_us", [0.0, 1e6], ids=["decoding", "pulling"])
def test_a_request_that_was_lost_where_it_decodes_begins_again(
    handshake: str, setup_us: float, usual: RunLog
) -> None:
    die_s = 0.5 if setup_us else usual.records[0].token_times_s[3]
    fleet, log = split(handshake, f"{die_s}:die:2", setup_us=setup_us)
    assert sent_to(fleet, "decode") == [2, 3]
    assert sent_to(fleet, "prefill") == [0, 1]
    assert fleet.retried == 1
    lost = [step for step in log.steps if step.replica == 2]
    assert fleet.lost_tokens == sum(step.prefill_tokens + step.output_tokens for step in lost)
    assert bool(lost) == (setup_us == 0)
    assert log.records[0].output_token_ids == usual.records[0].output_token_ids
    assert log.records[0].replica == 3


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_a_replica_that_drains_keeps_a_prompt_until_it_was_pulled(handshake: str) -> None:
    fleet, log = split(handshake, "0.5:drain:0", setup_us=1e6)
    assert fleet.split is not None
    assert [each.source for each in fleet.split.transfers] == [0]
    assert log.records[0].token_times_s[0] > 1.0


@pytest.mark.parametrize("handshake", HANDSHAKES)
@pytest.mark.parametrize(("prefill", "dead"), [(2, 0), (1, 1)], ids=["source", "target"])
def test_a_transfer_that_breaks_off_leaves_both_ends_free(handshake: str, prefill: int, dead: int) -> None:
    fleet, _ = split(
        handshake, f"0.5:die:{dead}", setup_us=1e6, prefill=prefill, decode=3 - prefill, more=[other(0.6)]
    )
    assert fleet.split is not None
    broken, *others = fleet.split.transfers
    assert broken.end_s == 0.5
    assert dead in (broken.source, broken.target)
    assert 0.5 <= others[0].start_s < 0.7


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_what_was_planned_behind_a_transfer_that_breaks_off_keeps_its_time(handshake: str) -> None:
    fleet, _ = split(handshake, "0.5:die:0", setup_us=1e6, decode=1, more=[other(0.1)])
    assert fleet.split is not None
    broken, later = fleet.split.transfers
    assert (broken.source, broken.end_s) == (0, 0.5)
    assert later.source == 1
    assert 1.0 < later.start_s < 1.1


@pytest.mark.parametrize("handshake", HANDSHAKES)
@pytest.mark.parametrize(("prefill", "dead"), [(2, 0), (1, 1)], ids=["source", "target"])
def test_what_was_on_its_way_for_a_request_that_was_aborted_breaks_off_too(
    handshake: str, prefill: int, dead: int
) -> None:
    link = LinkConfig(setup_us=1e6)
    life = [f"0.5:die:{dead}"]
    fleet = fleet_of(FleetConfig(replicas=3, prefill=prefill, handshake=handshake, life=life, link=link))
    ended = list[RequestRecord]()
    fleet.submit(ASKED, on_finish=ended.append)
    fleet.submit(other(0.6), on_finish=ended.append)
    assert fleet.split is not None
    while not fleet.split.transfers:
        fleet.step()
    now = fleet.clock.now()
    assert fleet.abort("r0")
    assert ended[0].finished_s == now
    while fleet.has_work():
        if fleet.step() is None and (when := fleet.next_wakeup()) is not None:
            fleet.clock.wait_until(when)
    broken, later = fleet.split.transfers
    assert broken.end_s == 0.5
    assert 0.6 < later.start_s < 0.7  # both ends are free


@pytest.mark.parametrize("handshake", HANDSHAKES)
def test_what_waits_for_a_request_that_was_aborted_is_given_back_at_once(handshake: str) -> None:
    """Not when the transfer would have ended."""
    link = LinkConfig(setup_us=1e6)
    fleet = fleet_of(FleetConfig(replicas=3, prefill=1, handshake=handshake, link=link))
    beside = Request("r1", prompt_for("r1", 3), SamplingParams(max_tokens=9), 0.4)  # by the third replica alone
    for request in (ASKED, beside):
        fleet.submit(request)
    while fleet.clock.now() < 0.4:
        fleet.step()
    assert fleet.abort("r0")
    while fleet.has_work():
        fleet.step()
    assert max(replica.core.clock.now() for replica in fleet.replicas) < 0.5
    assert [replica.core.pool.stats().blocks_in_use for replica in fleet.replicas] == [0, 0, 0]


def test_an_abort_of_what_was_due_next_lets_no_step_begin_before_a_request_that_comes_earlier() -> None:
    fleet = fleet_of(FleetConfig(replicas=2, prefill=1, link=LinkConfig(setup_us=1e6)))
    for request in (ASKED, other(0.2)):
        fleet.submit(request)
    while fleet.clock.now() < 0.2:
        fleet.step()
    assert fleet.abort("r1")
    assert fleet.clock.now() > 1.0  # when the transfer ends
    fleet.submit(other(0.3))
    assert fleet.clock.now() == 0.3
