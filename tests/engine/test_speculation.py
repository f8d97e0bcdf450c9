"""Speculative decoding: outputs are those of decoding one token at a time, in fewer steps, and memory is exact."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.config import PreemptionConfig, SpeculationConfig
from kvlab.core import FinishReason, Request, SamplingParams, Sequence, StepRecord
from kvlab.engine.core import EngineCore
from kvlab.engine.executors.torch import TorchExecutor
from kvlab.engine.per_sequence import PerSequenceExecutor
from kvlab.engine.sampler import Sampler
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.view import CacheView
from tests.support.engines import Aborting, Stream, drain, make_engine, request
from tests.support.executors import RecordingExecutor
from tests.support.grammar import Alternating
from tests.support.model import tiny_decoder
from tests.support.plans import planned
from tests.support.pools import paged_pool, sharing_pool, slotted_pool
from tests.support.records import memory
from tests.support.speculation import recalling

POOLS = {"paged": paged_pool, "sharing": sharing_pool, "contiguous": slotted_pool}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "seed": 3, "top_k": 20, "top_p": 0.9},
    "samples": {"temperature": 2.0, "seed": 3, "n": 2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bias": {"logit_bias": ((5, 4.0), (9, -4.0))},
    "logprobs": {"logprobs": 2, "temperature": 0.7, "seed": 1},
    "grammar": {"grammar": Alternating(least=99)},
    "at least": {"min_tokens": 9, "stop_token_ids": tuple(range(1, 200, 3))},
}
NGRAM = SpeculationConfig("ngram", 4, prompt_lookup_min=1)


def serve(engine: EngineCore, *requests: Request) -> tuple[list[Sequence], list[StepRecord]]:
    firsts = [engine.add_request(each) for each in requests]
    records = drain(engine)
    return [each for first in firsts for each in (first, *first.siblings)], records


def accepted(records: list[StepRecord]) -> int:
    return sum(record.accepted_tokens for record in records)


def outcome(sequence: Sequence) -> tuple[object, ...]:
    return sequence.output_token_ids, sequence.finish_reason, sequence.error


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_outputs_are_those_without_speculation(kind: str, sampling: dict[str, Any]) -> None:
    asked = [request("a", 9, 17, **sampling), request("b", 14, 12, **sampling)]
    plain, _ = serve(make_engine(POOLS[kind]()), *asked)
    with recalling([each.token_ids for each in plain]) as speculation:
        found, records = serve(make_engine(POOLS[kind](), speculation=speculation), *asked)
    assert list(map(outcome, found)) == list(map(outcome, plain))
    assert 0 < accepted(records) < sum(record.proposed_tokens for record in records)
    for each, same in zip(found, plain, strict=True):
        assert [entry.logprob for entry in each.logprobs] == pytest.approx(
            [e.logprob for e in same.logprobs], abs=1e-5
        )


@pytest.mark.parametrize("sharing", [False, True])
def test_in_little_memory_beside_chunks_of_prompts(sharing: bool) -> None:
    asked = [request(f"r{index}", 18, 20, prompt_of="one") for index in range(3)]
    asked += [request("long", 40, 10), request("other", 11, 22)]
    settings: dict[str, Any] = {"long_prefill_threshold": 7, "admission_reserve": 0.0, "max_batched_tokens": 24}
    plain, slow = serve(make_engine(paged_pool(20, sharing=sharing), **settings), *asked)
    with recalling([each.token_ids for each in plain]) as speculation:
        found, records = serve(
            make_engine(paged_pool(20, sharing=sharing), speculation=speculation, **settings), *asked
        )
    assert list(map(outcome, found)) == list(map(outcome, plain))
    assert sum(each.preemptions for each in found) > 0
    assert accepted(records) > 20
    assert len(records) < len(slow)
    assert all(record.prefill_tokens + record.decode_tokens <= 24 for record in records)


def test_one_pass_for_each_sequence_gives_the_same() -> None:
    asked = [request("a", 9, 17), request("b", 14, 12, repetition_penalty=1.3)]
    plain, _ = serve(make_engine(), *asked)
    executor = PerSequenceExecutor(TorchExecutor(tiny_decoder(), Sampler()))
    with recalling([each.token_ids for each in plain]) as speculation:
        found, records = serve(make_engine(executor=executor, speculation=speculation), *asked)
    assert list(map(outcome, found)) == list(map(outcome, plain))
    assert accepted(records) > 0


@pytest.mark.parametrize("place", range(3, 8))
def test_a_stop_token_ends_an_accepted_run(place: int) -> None:
    (plain,), _ = serve(make_engine(), request("a", 9, 17))
    stop = plain.output_token_ids[place]
    with recalling([plain.token_ids], wrong_every=99) as speculation:
        engine, stream = make_engine(speculation=speculation), Stream()
        sequence = engine.add_request(request("a", 9, 17, stop_token_ids=(stop,)), stream)
        records = drain(engine)
    expected = plain.output_token_ids[: plain.output_token_ids.index(stop) + 1]
    assert sequence.output_token_ids == stream.tokens == expected
    assert stream.ends == [sequence.finish_reason] == [FinishReason.STOP]
    assert sum(record.output_tokens for record in records) == len(expected)


def test_a_stop_string_ends_an_accepted_run() -> None:
    (plain,), _ = serve(make_engine(), request("a", 9, 17))
    stop = f"<{plain.output_token_ids[5]}>"
    with recalling([plain.token_ids], wrong_every=99) as speculation:
        engine = make_engine(
            sharing_pool(), detokenize=lambda ids: "".join(f"<{each}>" for each in ids), speculation=speculation
        )
        stream = Stream()
        sequence = engine.add_request(request("a", 9, 17, stop=(stop,)), stream)
        drain(engine)
    assert sequence.output_token_ids == stream.tokens == plain.output_token_ids[:6]
    assert sequence.text == "".join(f"<{each}>" for each in plain.output_token_ids[:5])


def test_a_callback_may_abort_within_an_accepted_run() -> None:
    (plain,), _ = serve(make_engine(), request("a", 9, 17))
    with recalling([plain.token_ids], wrong_every=99) as speculation:
        engine = make_engine(speculation=speculation)
        stream = Stream()

        def third(output: Any) -> None:
            stream(output)
            if len(stream.tokens) == 3 and output.finish_reason is None:
                Aborting(engine, "a")(output)

        sequence = engine.add_request(request("a", 9, 17), third)
        drain(engine)
    assert stream.tokens == sequence.output_token_ids == plain.output_token_ids[:3]
    assert stream.ends == [FinishReason.ABORTED]


def test_the_records_say_what_was_proposed() -> None:
    asked = request("a", 9, 12)
    (plain,), _ = serve(make_engine(), asked)
    executor = RecordingExecutor(step_s=1.0)
    with recalling([plain.token_ids], wrong_every=99) as speculation:
        (sequence,), records = serve(make_engine(executor=executor, speculation=speculation), asked)
    assert [record.proposed_tokens for record in records if record.batch_seqs] == [
        0,
        5,
        4,
    ]  # one token is always left
    assert accepted(records) == 9
    assert [record.decode_tokens for record in records if record.batch_seqs] == [0, 6, 5]
    assert [record.sampled_tokens for record in records if record.batch_seqs] == [1, 6, 5]
    first = records[1]
    assert (first.context_tokens, first.attended_tokens) == (15, 10 + 11 + 12 + 13 + 14 + 15)
    assert sequence.token_times_s == [1.0] + 6 * [2.0] + 5 * [3.0]


def test_what_was_not_accepted_leaves_no_memory_behind() -> None:
    (plain,), slow = serve(make_engine(), request("a", 9, 17))
    with recalling([plain.token_ids], wrong_every=1) as speculation:
        (found,), records = serve(make_engine(speculation=speculation), request("a", 9, 17))
    assert outcome(found) == outcome(plain)
    assert accepted(records) == 0
    assert [memory(each).tokens_stored for each in records] == [memory(each).tokens_stored for each in slow]
    assert [memory(each).blocks_in_use for each in records] == [memory(each).blocks_in_use for each in slow]


def test_proposals_preempt_nobody() -> None:
    asked = [request(name, 8, 8) for name in "abc"]  # 3 x 4 blocks of 4 tokens
    settings: dict[str, Any] = {"admission_reserve": 0.0, "preemption": PreemptionConfig("last_admitted")}
    plain, slow = serve(make_engine(paged_pool(12), **settings), *asked)
    with recalling([each.token_ids for each in plain], wrong_every=2) as speculation:
        found, records = serve(make_engine(paged_pool(12), speculation=speculation, **settings), *asked)
    assert list(map(outcome, found)) == list(map(outcome, plain))
    assert sum(record.preempted for record in records) == sum(record.preempted for record in slow) == 0
    assert accepted(records) > 0


def test_where_blocks_run_out_decoding_goes_on_without_proposals() -> None:
    executor = RecordingExecutor()
    (plain,), _ = serve(make_engine(paged_pool(6)), request("a", 9, 12))
    with recalling([plain.token_ids], wrong_every=99) as speculation:
        engine = make_engine(paged_pool(6), executor, speculation=speculation, admission_reserve=0.0)
        taken = [engine.pool.allocate_slot(4) for _ in range(3)]  # leaves the three that the prompt takes
        sequence = engine.add_request(request("a", 9, 12))
        for _ in range(3):
            engine.step()
        assert executor.steps[1:] == [{"a": 1}, {"a": 1}]
        for slot in taken:
            engine.pool.free_slot(slot)
        drain(engine)
    assert {"a": 6} in executor.steps
    assert outcome(sequence) == outcome(plain)


def test_what_was_kept_is_found_again_in_the_prefix_cache() -> None:
    (plain,), _ = serve(make_engine(), request("a", 9, 18))
    known = tuple(plain.token_ids[:-1])  # the last token is not computed
    for wrong in (99, 3, 1):
        with recalling([plain.token_ids], wrong_every=wrong) as speculation:
            engine = make_engine(sharing_pool(), speculation=speculation)
            serve(engine, request("a", 9, 18))
            assert engine.pool.prefix_tokens(known) == len(known) // 4 * 4
            follow = Request("b", (*known, 7), SamplingParams(max_tokens=2))
            (again,), _ = serve(engine, follow)
        assert again.cached_tokens == len(known) // 4 * 4
        assert outcome(again) == outcome(serve(make_engine(), follow)[0][0])


def test_blocks_are_shared_while_both_sequences_run() -> None:
    (plain,), _ = serve(make_engine(), request("a", 9, 24))
    with recalling([plain.token_ids], wrong_every=5) as speculation:
        engine = make_engine(sharing_pool(), speculation=speculation)
        found, records = serve(engine, request("a", 9, 24), request("b", 9, 24, prompt_of="a"))
    assert [each.output_token_ids for each in found] == [plain.output_token_ids] * 2
    assert engine.pool.counters().merged_blocks >= 5
    assert max(memory(record).shared_blocks for record in records) >= 6


def test_lookup_finds_what_repeats() -> None:
    """Tiny models end in loops."""
    asked = [request(name, 10, 60) for name in "ab"]
    plain, slow = serve(make_engine(paged_pool(64)), *asked)
    found, records = serve(make_engine(paged_pool(64), speculation=NGRAM), *asked)
    assert list(map(outcome, found)) == list(map(outcome, plain))
    assert accepted(records) > 0
    assert len(records) < len(slow)


class Short(TorchExecutor):
    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        result = super().execute(step, view)
        return StepResult(result.token_ids[: len(step.sampled)])


def test_a_pass_that_fails_is_run_again_without_proposals() -> None:
    asked = [request("a", 9, 12), request("b", 9, 12)]
    plain, _ = serve(make_engine(), *asked)
    with recalling([each.token_ids for each in plain]) as speculation:
        engine = make_engine(executor=Short(tiny_decoder(), Sampler()), speculation=speculation)
        found, records = serve(engine, *asked)
        (alone,), _ = serve(
            make_engine(executor=Short(tiny_decoder(), Sampler()), speculation=speculation), asked[0]
        )
    assert list(map(outcome, found)) == list(map(outcome, plain))
    assert sum(record.failed_passes for record in records) > 0
    assert sum(record.proposed_tokens for record in records) == 0
    assert alone.error == "RuntimeError: 1 tokens came back for 6 rows of logits"


def test_proposers_of_sequences_that_ended_are_forgotten() -> None:
    engine = make_engine(speculation=NGRAM)
    serve(engine, request("a", 9, 12))
    assert not engine.scheduler.speculation._proposers


def test_the_planner_counts_the_rows_of_proposals() -> None:
    method, most = "scheduler.speculation.method=ngram", "scheduler.speculation.num_speculative_tokens=3"
    batch = "scheduler.max_batch_size=4"
    plain, without, speculating = (planned(batch, *more).working.logits for more in ((), (most,), (most, method)))
    assert plain == without
    four, sixteen = plain, planned("scheduler.max_batch_size=16").working.logits
    assert four < speculating == sixteen
