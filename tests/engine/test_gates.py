"""Admission beside the reserve: watermark, whole outputs, a bounded waiting queue, and what can never fit."""

from __future__ import annotations

import pytest

from kvlab.core import Request, SamplingParams, SequenceStatus
from kvlab.errors import RequestRefusedError
from tests.support.engines import drain
from tests.support.records import memory
from tests.support.table import VOCAB, table_engine, table_pool, table_slots, undisturbed


def asked(number: int, prompt_len: int, max_tokens: int, n: int = 1) -> Request:
    first = 1000 * number
    return Request(f"r{number}", tuple(range(first, first + prompt_len)), SamplingParams(max_tokens, n=n))


class TestWatermark:
    """24 blocks of 4 tokens."""

    @pytest.mark.parametrize(
        ("watermark", "reserve", "entered"),
        [(0.5, 0.0, 3), (0.99, 0.0, 1), (0.1, 0.2, 4)],
    )
    def test_a_share_of_the_pool_stays_free(self, watermark: float, reserve: float, entered: int) -> None:
        engine = table_engine(
            table_pool(24), watermark=watermark, admission_reserve=reserve, max_batched_tokens=512
        )
        for number in range(8):
            engine.add_request(asked(number, 16, 1))
        record = engine.step()
        assert record is not None
        assert (record.running, record.waiting) == (entered, 8 - entered)
        drain(engine)

    def test_of_the_pool_and_not_of_what_is_free(self) -> None:
        engine = table_engine(table_pool(24), watermark=0.25, admission_reserve=0.0, max_batched_tokens=512)
        for number in range(8):
            engine.add_request(asked(number, 15, 8))
        running = [record.running for record in (engine.step() for _ in range(2)) if record is not None]
        assert running == [4, 4]  # 6 of 24 blocks: with 8 free after the first step, no prompt of 4 may enter
        drain(engine)


class TestWholeOutputs:
    def test_a_sequence_enters_only_where_all_it_may_produce_fits(self) -> None:
        engine = table_engine(table_pool(24), reserve_output=True, admission_reserve=0.0, max_batched_tokens=512)
        sequences = [engine.add_request(asked(number, 8, 24)) for number in range(5)]  # 2 blocks now, 8 in the end
        record = engine.step()
        assert record is not None
        assert (record.running, record.waiting, memory(record).blocks_in_use) == (3, 2, 6)
        drain(engine)
        assert not any(sequence.preemptions for sequence in sequences)

    def test_all_samples_of_a_request_count(self) -> None:
        """20 prompt tokens are five blocks, shared; each of four samples grows by three of its own."""
        engine = table_engine(table_pool(17), reserve_output=True, admission_reserve=0.0, max_batched_tokens=512)
        first = engine.add_request(asked(0, 20, 12, n=4))
        other = engine.add_request(asked(1, 4, 1))
        engine.step()
        assert other.status is SequenceStatus.WAITING
        drain(engine)
        assert not any(s.preemptions for s in (first, *first.siblings, other))

    def test_alone_a_sequence_enters_whatever_it_may_produce(self) -> None:
        engine = table_engine(table_pool(24), reserve_output=True, max_batched_tokens=512)
        sequence = engine.add_request(asked(0, 8, 88))
        drain(engine)
        assert sequence.output_token_ids == undisturbed(sequence.request)

    def test_contiguous_slots_are_whole_already(self) -> None:
        engine = table_engine(table_slots(3), reserve_output=True)
        for number in range(5):
            engine.add_request(asked(number, 8, 24))
        record = engine.step()
        assert record is not None
        assert record.running == 3
        drain(engine)

    @pytest.mark.parametrize("max_batch_size", [2, 8])
    def test_a_static_batch_has_its_memory_from_the_start(self, max_batch_size: int) -> None:
        engine = table_engine(table_pool(24), policy="static", max_wait_ms=0, max_batch_size=max_batch_size)
        sequences = [engine.add_request(asked(number, 8, 24)) for number in range(7)]
        record = engine.step()
        assert record is not None
        assert record.running == min(max_batch_size, 2)  # two of eight blocks; a third would touch the reserve
        drain(engine)
        assert not any(sequence.preemptions for sequence in sequences)


class TestWaitingQueue:
    def test_counts_requests_and_not_their_samples(self) -> None:
        engine = table_engine(table_slots(2), max_waiting_requests=2)
        engine.add_request(asked(0, 4, 6, n=5))
        engine.step()
        assert len(engine.scheduler.waiting) == 3
        engine.add_request(asked(1, 4, 2))
        with pytest.raises(RequestRefusedError, match="2 requests are waiting"):
            engine.add_request(asked(2, 4, 2))
        drain(engine)

    def test_a_preempted_sequence_is_never_refused(self) -> None:
        engine = table_engine(table_pool(15), admission_reserve=0.0, max_waiting_requests=1)
        sequences = []
        for number in range(3):
            sequences.append(engine.add_request(asked(number, 16, 20)))
            engine.step()
        drain(engine)
        assert any(s.preemptions for s in sequences)
        assert [s.output_token_ids for s in sequences] == [undisturbed(s.request) for s in sequences]


class TestRefusedOnArrival:
    @pytest.mark.parametrize(
        ("prompt_len", "max_tokens", "advice"),
        [(96, 1, "a prompt of up to 95 tokens would")],
    )
    def test_what_can_never_fit_and_what_would(self, prompt_len: int, max_tokens: int, advice: str) -> None:
        engine = table_engine(table_pool(24))
        neighbour = engine.add_request(asked(1, 8, 8))
        with pytest.raises(RequestRefusedError, match=f"can never fit.* up to 96 tokens; .*{advice}"):
            engine.add_request(asked(0, prompt_len, max_tokens))
        drain(engine)
        assert neighbour.output_token_ids == undisturbed(neighbour.request)

    @pytest.mark.parametrize(
        ("prompt", "reason"),
        [
            ((), "an empty prompt"),
            ((5, VOCAB), f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
            ((5, -1), "token id -1 is outside"),
            ((5, 1.5), r"token id 1.5 is no whole number"),
            ((5, "a"), "token id 'a' is no whole number"),
            ((5, True), "token id True is no whole number"),
        ],
    )
    def test_prompts_that_are_none(self, prompt: tuple[int, ...], reason: str) -> None:
        engine = table_engine(table_pool(24))
        neighbour = engine.add_request(asked(1, 8, 8))
        with pytest.raises(RequestRefusedError, match=f"'x': {reason}"):
            engine.add_request(Request("x", prompt, SamplingParams(4)))
        drain(engine)
        assert neighbour.output_token_ids == undisturbed(neighbour.request)
