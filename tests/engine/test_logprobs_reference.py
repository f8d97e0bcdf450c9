"""Log-probabilities of the vectorised sampler against the readable one, and logits that are no numbers."""

from __future__ import annotations

import math

import pytest
import torch

from kvlab.core import Request, SamplingParams, Sequence, StepOutput
from kvlab.errors import SamplingError
from tests.engine.test_sampling_reference import logprobs_of, sampled, sequence
from tests.support.engines import drain, make_engine, request


class TestLogprobs:
    LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0]])

    def test_are_those_of_the_model_itself(self) -> None:
        """Whatever temperature and filters made of them."""
        one = sequence(
            SamplingParams(1, logprobs=2, temperature=0.1, top_k=1, repetition_penalty=9.0, seed=1), (1,)
        )
        (token,) = sampled(self.LOGITS, one)
        exact = self.LOGITS.log_softmax(dim=-1)[0].tolist()
        (found,) = logprobs_of(self.LOGITS, one)
        assert found is not None
        assert token == 2
        assert found.logprob == pytest.approx(exact[2])
        assert [each for each, _ in found.top] == [1, 2]
        assert [value for _, value in found.top] == pytest.approx([exact[1], exact[2]])

    @pytest.mark.parametrize(("asked", "given"), [(0, 0), (1, 1), (4, 4), (9, 4)])
    def test_as_many_alternatives_as_were_asked_for(self, asked: int, given: int) -> None:
        one, other = sequence(SamplingParams(1, logprobs=asked)), sequence(SamplingParams(1))
        found, nothing = logprobs_of(self.LOGITS.expand(2, -1), one, other)
        assert found is not None
        assert len(found.top) == given
        assert nothing is None

    def test_come_with_their_tokens(self) -> None:
        engine = make_engine(admission_reserve=0)
        outputs: list[StepOutput] = []
        firsts = [engine.add_request(request(name, 20, 30, logprobs=1), outputs.append) for name in "abc"]
        drain(engine)
        assert any(first.preemptions for first in firsts)
        for first in firsts:
            received = [output.logprobs for output in outputs if output.request_id == first.request.request_id]
            assert received == first.logprobs
            assert [one.top[0][0] for one in first.logprobs] == first.output_token_ids
            assert all(one.logprob == pytest.approx(one.top[0][1]) for one in first.logprobs)


class TestUnsoundLogits:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_name_the_request_that_they_belong_to(self, bad: float, temperature: float) -> None:
        logits = torch.zeros(3, 10)
        logits[1, 4] = bad
        rows = [
            Sequence(Request(name, (1,), SamplingParams(1, temperature=temperature))) for name in ("a", "b", "c")
        ]
        with pytest.raises(SamplingError, match="'b': the logits are not finite") as caught:
            sampled(logits, *rows)
        assert caught.value.request_ids == ("b",)

    def test_nor_may_every_token_be_masked(self) -> None:
        with pytest.raises(SamplingError, match="every token is masked"):
            sampled(torch.zeros(1, 3), sequence(SamplingParams(5, min_tokens=1, stop_token_ids=(0, 1, 2))))
