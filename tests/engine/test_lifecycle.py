"""Refused, aborted, failed, stopped: however a request ends, it ends once and leaves nothing behind."""

from __future__ import annotations

from itertools import zip_longest

import pytest

from kvlab.core import FinishReason, Request, SamplingParams, SequenceStatus, StepOutput
from kvlab.engine.core import EngineCore
from kvlab.engine.protocol import OutputCallback
from kvlab.errors import RequestRefusedError
from tests.support.engines import Stream, assert_empty, drain, make_engine, request, run, steps
from tests.support.executors import FailingExecutor, RecordingExecutor
from tests.support.model import expected_tokens
from tests.support.pools import slotted_pool
from tests.support.records import counted, memory

LENGTH, STOP, ABORTED, FAILED = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORTED, FinishReason.FAILED


class TestRefused:
    @pytest.mark.parametrize(
        ("asked", "reason"),
        [
            (Request("x", (), SamplingParams(4)), "'x': an empty prompt"),
            (Request("x", (1, 2), SamplingParams(0)), "'x': max_tokens=0; at least 1"),
            (Request("x", (1, 2), SamplingParams(-3)), "'x': max_tokens=-3; at least 1"),
            (request("x", 90, 7), r"'x': 90 prompt tokens \+ 7 output tokens can never fit.* up to 96 tokens"),
        ],
        ids=["empty", "no output", "less than none", "too long"],
    )
    def test_what_can_never_be_served_is_refused_with_its_reason(self, asked: Request, reason: str) -> None:
        engine, stream = make_engine(), Stream()
        with pytest.raises(RequestRefusedError, match=reason):
            engine.add_request(asked, stream)
        assert not engine.has_work()
        assert stream.outputs == []

    @pytest.mark.parametrize(("prompt_len", "max_tokens"), [(95, 1), (1, 95)])
    def test_one_as_long_as_the_pool_is_served(self, prompt_len: int, max_tokens: int) -> None:
        asked = request("x", prompt_len, max_tokens)
        (sequence,) = run(make_engine(), asked)
        assert sequence.output_token_ids == expected_tokens(asked)

    def test_an_id_in_use_is_refused_and_the_first_keeps_its_stream(self) -> None:
        engine, first, second = make_engine(), Stream(), Stream()
        asked = request("x", 10, 4)
        engine.add_request(asked, first)
        for _ in range(2):  # while it waits, and while it runs
            with pytest.raises(RequestRefusedError, match="'x' is in the engine already"):
                engine.add_request(request("x", 5, 2), second)
            engine.step()
        drain(engine)
        assert (first.tokens, second.outputs) == (expected_tokens(asked), [])

    @pytest.mark.parametrize("end", ["finished", "aborted"])
    def test_an_id_may_be_used_again_after_its_end(self, end: str) -> None:
        engine = make_engine()
        engine.add_request(request("x", 10, 4))
        if end == "aborted":
            engine.abort("x")
        else:
            drain(engine)
        (again,) = run(engine, request("x", 5, 2))
        assert again.output_token_ids == expected_tokens(request("x", 5, 2))


class TestAbort:
    def test_while_it_waits(self) -> None:
        engine, stream = make_engine(max_batch_size=1), Stream()
        running = engine.add_request(request("running", 10, 6))
        engine.step()
        waiting = engine.add_request(request("waiting", 10, 6), stream)
        engine.step()
        assert engine.abort("waiting")
        assert (waiting.status, waiting.finish_reason) == (SequenceStatus.FINISHED, ABORTED)
        drain(engine)
        assert (stream.tokens, stream.ends) == ([], [ABORTED])
        assert running.output_token_ids == expected_tokens(running.request)

    def test_before_the_first_step(self) -> None:
        engine = make_engine()
        engine.add_request(request("x", 10, 6))
        assert engine.abort("x")
        assert not engine.has_work()
        assert_empty(engine)

    @pytest.mark.parametrize(("steps_before", "tokens"), [(1, 0), (2, 0), (3, 1), (5, 3)], ids=str)
    def test_in_prefill_and_in_decode_gives_every_block_back(self, steps_before: int, tokens: int) -> None:
        engine, stream = make_engine(max_batched_tokens=10), Stream()
        sequence = engine.add_request(request("x", 25, 9), stream)
        for _ in range(steps_before):
            engine.step()
        held = engine.pool.stats().blocks_in_use
        assert held > 0
        assert engine.abort("x")
        record = engine.step()
        assert record is not None
        assert (record.batch_seqs, counted(record).blocks_freed, memory(record).blocks_in_use) == (0, held, 0)
        assert engine.step() is None
        assert_empty(engine)
        assert not engine.has_work()
        assert stream.tokens == expected_tokens(request("x", 25, 9))[:tokens]
        assert stream.ends == [ABORTED]
        assert sequence.slot is None

    def test_of_what_is_not_there_is_false(self) -> None:
        engine = make_engine()
        assert not engine.abort("nobody")
        engine.add_request(request("x", 10, 2))
        assert engine.abort("x")
        assert not engine.abort("x")
        run(engine, request("y", 4, 1))
        assert not engine.abort("y")


@pytest.mark.parametrize("make_pool", [None, slotted_pool], ids=["paged", "contiguous"])
class TestFailedStep:
    def test_fails_its_culprit_alone_and_the_engine_serves_the_next(self, make_pool: object) -> None:
        """`late` waits while the step of `bad` and `neighbour` fails."""
        pool = make_pool() if callable(make_pool) else None
        executor = FailingExecutor("bad")
        engine = make_engine(pool, executor, max_batch_size=2)
        streams = {name: Stream() for name in ("bad", "neighbour", "late")}
        sequences = {name: engine.add_request(request(name, 10, 4), stream) for name, stream in streams.items()}
        drain(engine)
        assert (sequences["bad"].finish_reason, streams["bad"].ends) == (FAILED, [FAILED])
        assert sequences["bad"].error == "ArithmeticError: the device fell over"
        assert streams["bad"].outputs[-1].error == "ArithmeticError: the device fell over"
        assert streams["bad"].tokens == []
        for name in ("neighbour", "late"):
            assert streams[name].tokens == expected_tokens(sequences[name].request)
            assert (sequences[name].finish_reason, sequences[name].error) == (LENGTH, None)
        (after,) = run(engine, request("after", 12, 5))
        assert after.output_token_ids == expected_tokens(after.request)

    def test_is_rolled_back(self, make_pool: object) -> None:
        """What it wrote is part of no sequence, and its view is closed."""
        pool = make_pool() if callable(make_pool) else None
        executor = FailingExecutor("bad")
        engine = make_engine(pool, executor, max_batched_tokens=8)
        engine.add_request(request("bad", 10, 4))
        record = engine.step()
        assert record is not None
        assert (record.prefill_tokens, memory(record).tokens_stored, record.recomputed_tokens) == (8, 0, 0)
        assert executor.view is not None
        with pytest.raises(RuntimeError, match="already advanced or rolled back"):
            executor.view.advance()
        drain(engine)

    def test_spares_the_others_of_it_and_those_that_had_no_place_in_it(self, make_pool: object) -> None:
        """Two samples were forked in the step before, and the first and `bad` use up the budget."""
        pool = make_pool() if callable(make_pool) else None
        executor = FailingExecutor("bad")
        executor.victim = None
        engine = make_engine(pool, executor, max_batch_size=4, max_batched_tokens=4)
        first, bad = engine.add_request(request("x", 2, 6, n=3)), engine.add_request(request("bad", 12, 4))
        engine.step()
        executor.victim = "bad"
        record = engine.step()
        assert record is not None
        assert (record.running, record.batch_seqs) == (4, 2)
        drain(engine)
        assert bad.finish_reason is FAILED
        for spared in (first, *first.siblings):
            assert spared.finish_reason is LENGTH
            assert spared.output_token_ids == expected_tokens(spared.request)

    def test_in_the_middle_of_decoding_keeps_the_tokens_that_were_sent(self, make_pool: object) -> None:
        pool = make_pool() if callable(make_pool) else None
        executor = FailingExecutor("bad")
        executor.victim = None
        engine, stream = make_engine(pool, executor), Stream()
        bad = engine.add_request(request("bad", 10, 8), stream)
        for _ in range(3):
            engine.step()
        executor.victim = "bad"
        record = engine.step()
        assert record is not None
        assert (record.decode_tokens, record.recomputed_tokens) == (1, 0)
        drain(engine)
        assert stream.tokens == bad.output_token_ids == expected_tokens(bad.request)[:3]
        assert stream.ends == [FAILED]


class TestStop:
    """A greedy run of 12 tokens, and what ends it early."""

    ASKED = request("x", 10, 12)

    def tokens(self) -> list[int]:
        return expected_tokens(self.ASKED)

    def first_of_a_kind(self) -> tuple[int, int]:
        """A token that first occurs at an index other than 0, and that index."""
        tokens = self.tokens()
        index = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
        return tokens[index], index

    def test_at_the_end_of_sequence_token(self) -> None:
        token, index = self.first_of_a_kind()
        (sequence,) = run(make_engine(eos=(199, token)), self.ASKED)
        assert (sequence.output_token_ids, sequence.finish_reason) == (self.tokens()[: index + 1], STOP)

    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_at_a_stop_token_of_its_own(self, ignore_eos: bool) -> None:
        token, index = self.first_of_a_kind()
        stops = request("x", 10, 12, stop_token_ids=(198, token), ignore_eos=ignore_eos)
        other = request("y", 10, 12, prompt_of="x")
        sequence, neighbour = run(make_engine(), stops, other)
        assert (sequence.output_token_ids, sequence.finish_reason) == (self.tokens()[: index + 1], STOP)
        assert neighbour.output_token_ids == self.tokens()

    def test_not_at_a_stop_token_in_its_prompt(self) -> None:
        in_prompt = next(token for token in self.ASKED.prompt_token_ids if token not in self.tokens())
        (sequence,) = run(make_engine(eos=(in_prompt,)), request("x", 10, 12, stop_token_ids=(in_prompt,)))
        assert (sequence.output_token_ids, sequence.finish_reason) == (self.tokens(), LENGTH)


class TestStreams:
    def test_each_sees_its_tokens_in_order_and_one_end(self) -> None:
        """Under preemption too: what was sent is not sent again."""
        engine = make_engine(admission_reserve=0, max_batched_tokens=16)
        asked = [request(f"r{index}", 20, 25) for index in range(4)]
        streams = [Stream() for _ in asked]
        sequences = [engine.add_request(each, stream) for each, stream in zip(asked, streams, strict=True)]
        drain(engine)
        assert any(sequence.preemptions for sequence in sequences)
        for each, stream in zip(asked, streams, strict=True):
            assert stream.tokens == expected_tokens(each)
            assert stream.ends == [LENGTH]
            assert stream.outputs[-1].finish_reason is LENGTH
            assert {output.request_id for output in stream.outputs} == {each.request_id}
            assert all(output.error is None for output in stream.outputs)

    def test_a_token_is_sent_in_the_step_that_made_it(self) -> None:
        engine, stream = make_engine(max_batched_tokens=8), Stream()
        engine.add_request(request("x", 20, 4), stream)
        seen = []
        for _ in steps(engine):
            seen.append(len(stream.tokens))
        assert seen == [0, 0, 1, 2, 3, 4, 4]

    def test_a_request_without_one_is_served(self) -> None:
        (sequence,) = run(make_engine(), request("x", 10, 3))
        assert sequence.output_token_ids == expected_tokens(sequence.request)


def aborting(engine: EngineCore, request_id: str) -> OutputCallback:
    """An output callback that aborts a request at any output."""

    def callback(output: StepOutput) -> None:
        engine.abort(request_id)

    return callback


class TestCallbacksThatAbort:
    """A server finds a stop string in what it streams, and aborts the request from inside its callback."""

    @pytest.mark.parametrize("max_tokens", [1, 5])
    def test_their_own_request(self, max_tokens: int) -> None:
        engine, stream = make_engine(), Stream()
        asked = request("x", 5, max_tokens)

        def callback(output: StepOutput) -> None:
            stream(output)
            engine.abort("x")

        engine.add_request(asked, callback)
        drain(engine)
        assert stream.tokens == expected_tokens(asked)[:1]
        assert stream.ends == [LENGTH if max_tokens == 1 else ABORTED]

    def test_another_request_of_the_same_step(self) -> None:
        engine, stream = make_engine(), Stream()
        engine.add_request(request("x", 5, 4), aborting(engine, "y"))
        engine.add_request(request("y", 5, 1), stream)
        drain(engine)
        assert stream.ends == [ABORTED]

    def test_another_request_of_a_step_that_fails(self) -> None:
        engine, stream = make_engine(executor=FailingExecutor("x")), Stream()
        engine.add_request(request("x", 5, 4), aborting(engine, "y"))
        engine.add_request(request("y", 5, 4), stream)
        drain(engine)
        assert stream.ends == [ABORTED]


def test_a_callback_may_close_the_engine_in_the_middle_of_a_pass() -> None:
    engine, streams = make_engine(), [Stream(), Stream(), Stream()]

    def close(output: StepOutput) -> None:
        streams[1](output)
        if len(streams[1].outputs) == 3:
            engine.close()

    callbacks: list[OutputCallback] = [streams[0], close, streams[2]]
    for name, callback in zip("abc", callbacks, strict=True):
        engine.add_request(request(name, 6, 9, ignore_eos=True), callback)
    for _ in range(3):
        engine.step()
    assert not engine.has_work()
    assert [stream.ends for stream in streams] == [[ABORTED]] * 3
    assert [len(stream.tokens) for stream in streams] == [3, 3, 2]
    assert_empty(engine)


def test_a_sequence_that_outgrows_what_is_left_of_the_pool_fails_alone() -> None:
    """12 of 24 blocks belong to a slot that is not the engine's."""
    engine, stream = make_engine(), Stream()
    held = engine.pool.allocate_slot(48)
    engine.add_request(request("grows", 40, 30), stream)
    for _ in range(20):
        engine.step()
    assert not engine.has_work()
    assert stream.tokens == expected_tokens(request("grows", 40, 30))[:9]
    assert stream.ends == [FAILED]
    assert "out of KV blocks: 1 wanted" in (stream.outputs[-1].error or "")
    engine.pool.free_slot(held)
    (after,) = run(engine, request("after", 40, 30))
    assert after.output_token_ids == expected_tokens(after.request)


def test_two_engines_in_one_process_share_nothing() -> None:
    """Stepped in turn, with the same request ids; one of them fails a step."""
    failing = FailingExecutor("b")
    engines = [make_engine(), make_engine(executor=failing, max_batched_tokens=9), make_engine(slotted_pool())]
    asked = [[request(name, 8 + 5 * index, 6) for name in "abc"] for index in range(3)]
    sequences = [
        [engine.add_request(each) for each in requests] for engine, requests in zip(engines, asked, strict=True)
    ]
    for _ in zip_longest(*(steps(engine) for engine in engines)):
        pass
    for engine in engines:
        assert_empty(engine)
    for index in (0, 2):
        assert [s.output_token_ids for s in sequences[index]] == [expected_tokens(each) for each in asked[index]]
    assert sequences[1][1].finish_reason is FAILED
    assert all(s.finish_reason is LENGTH for s in sequences[0] + sequences[2])


def test_an_idle_engine_has_nothing_to_do() -> None:
    executor = RecordingExecutor()
    engine = make_engine(executor=executor)
    assert engine.step() is None
    assert not engine.has_work()
    assert engine.next_wakeup() is None
    assert executor.steps == []
