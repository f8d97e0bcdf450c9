"""Outputs that follow a grammar, in every batch; others are as without it."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from kvlab.core import FinishReason, Sequence
from kvlab.engine.core import EngineCore
from kvlab.engine.executors.torch import TorchExecutor
from kvlab.engine.sampler import Sampler
from kvlab.errors import RequestRefusedError
from tests.support.engines import drain, make_engine, request
from tests.support.grammar import END, Alternating
from tests.support.model import tiny_decoder
from tests.support.pools import paged_pool, sharing_pool

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "seed": 3, "top_k": 20},
    "samples": {"temperature": 2.0, "seed": 3, "n": 3},
    "logprobs": {"logprobs": 2},
}


def serve(engine: EngineCore, *requests: Any) -> list[list[Sequence]]:
    firsts = [engine.add_request(each) for each in requests]
    drain(engine)
    return [[first, *first.siblings] for first in firsts]


def follows(sequence: Sequence) -> bool:
    output = sequence.output_token_ids
    if sequence.finish_reason is FinishReason.STOP:
        assert output[-1] == END
        output = output[:-1]
        assert len(output) >= 3
    return Alternating().follows(output)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_outputs_follow_it_beside_others_that_need_not(sampling: dict[str, Any]) -> None:
    free = [request("free", 12, 20, **sampling), request("other", 30, 9)]
    held = [request(f"held{n}", 8 + n, 24, grammar=Alternating(), **sampling) for n in range(3)]
    alone = serve(make_engine(eos=(END,)), *free)
    apart = [serve(make_engine(eos=(END,)), each)[0] for each in held]
    together = serve(make_engine(eos=(END,)), *held, *free)
    outputs = [[each.output_token_ids for each in samples] for samples in together]
    assert all(follows(each) for samples in together[:3] for each in samples)
    assert outputs[:3] == [[each.output_token_ids for each in samples] for samples in apart]
    assert outputs[3:] == [[each.output_token_ids for each in samples] for samples in alone]
    assert not all(follows(each) for samples in alone for each in samples)


@pytest.mark.parametrize("pool", [paged_pool, sharing_pool])
def test_outputs_are_the_same_in_little_memory(pool: Any) -> None:
    asked = [
        request(f"r{n}", 18, 20, prompt_of="one", grammar=Alternating(), temperature=1.0, seed=n) for n in range(4)
    ]
    wide = serve(make_engine(pool(), eos=(END,)), *asked)
    engine = make_engine(pool(num_blocks=16), eos=(END,), max_batched_tokens=12)
    narrow = serve(engine, *asked)
    assert any(each.preempted_s for [each] in narrow)
    assert [each.output_token_ids for [each] in narrow] == [each.output_token_ids for [each] in wide]


@pytest.mark.parametrize(
    "masks",
    [
        {"min_tokens": 12, "grammar": Alternating(least=0), "allowed_token_ids": (END,)},
        {"bad_words": tuple((token,) for token in range(200) if token != END), "grammar": Alternating(least=5)},
        {"allowed_token_ids": (0, 2, 4), "grammar": Alternating()},
    ],
)
def test_masks_that_leave_none_of_its_tokens_do_not_count(masks: dict[str, Any]) -> None:
    [[found]] = serve(make_engine(eos=(END,)), request("a", 9, 12, **masks))
    assert found.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    output = found.output_token_ids
    assert masks["grammar"].follows(output[:-1] if output[-1] == END else output)


def test_one_that_becomes_too_complex_ends_its_request_alone() -> None:
    asked = [request("a", 9, 12), request("b", 9, 12, grammar=Alternating(least=99, most=4))]
    [[first], [second]] = serve(make_engine(eos=(END,)), *asked)
    assert first.error is None
    assert second.error is not None
    assert "cannot be followed: too long" in second.error
    assert len(second.output_token_ids) == 4


def test_states_are_gone_with_their_sequences() -> None:
    sampler = Sampler()
    engine = make_engine(executor=TorchExecutor(tiny_decoder(), sampler), eos=(END,))
    engine.add_request(request("a", 9, 12, grammar=Alternating(least=12)))
    engine.step()
    assert len(sampler._grammars) == 1
    drain(engine)
    engine.step()
    gc.collect()
    assert len(sampler._grammars) == 0


def test_one_that_may_not_end_is_refused() -> None:
    with pytest.raises(RequestRefusedError, match="ignore_eos=True; the grammar says where the output ends"):
        make_engine(eos=(END,)).add_request(request("a", 9, 12, grammar=Alternating(), ignore_eos=True))
