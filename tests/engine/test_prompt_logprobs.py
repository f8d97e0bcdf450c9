"""Log-probabilities of a prompt's tokens: those of one pass over the whole prompt, whatever the engine does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvlab.core import Request, StepOutput
from kvlab.engine.per_sequence import PerSequenceExecutor
from kvlab.errors import RequestRefusedError
from kvlab.kv.pools.contiguous import ContiguousKVCachePool
from kvlab.kv.storage import KVStorage
from tests.support.engines import drain, make_engine, request
from tests.support.model import expected_tokens, tiny_config, tiny_decoder
from tests.support.pools import paged_pool, sharing_pool


def asking(name: str, length: int, alternatives: int = 2, *, n: int = 1, prompt_of: str | None = None) -> Request:
    plain = request(name, length, 4, prompt_of=prompt_of)
    return replace(plain, sampling=replace(plain.sampling, prompt_logprobs=alternatives, n=n))


def by_the_book(asked: Request) -> torch.Tensor:
    """Of every token behind every token of the prompt, `[length, vocab]`: one pass, by the readable model."""
    ids = asked.prompt_token_ids
    pool = ContiguousKVCachePool(1, len(ids), KVStorage(tiny_config().kv_spec("float32"), 1, len(ids)))
    view = pool.view([pool.allocate_slot(len(ids))], [len(ids)])
    return tiny_decoder().forward(torch.tensor(ids), view, torch.arange(len(ids))).log_softmax(dim=-1)


def check(asked: Request, outputs: list[StepOutput]) -> None:
    """The first output of each sample has all of them, and no other has any."""
    book, ids = by_the_book(asked), asked.prompt_token_ids
    first: dict[int, StepOutput] = {}
    for output in outputs:
        assert (output.prompt_logprobs is None) == (output.index in first)
        first.setdefault(output.index, output)
    assert len(first) == asked.sampling.n
    for output in first.values():
        entries = output.prompt_logprobs
        assert entries is not None
        assert len(entries) == len(ids) - 1
        for place, entry in enumerate(entries):
            assert entry.logprob == pytest.approx(book[place, ids[place + 1]].item(), abs=1e-4)
            best = book[place].topk(len(entry.top))
            assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert len(entry.top) == asked.sampling.prompt_logprobs


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("budget", [7, 64])
def test_they_are_those_of_one_pass(budget: int, sharing: bool) -> None:
    """In chunks, beside requests that decode, with a prompt that the cache has, and for each of several samples."""
    engine = make_engine((sharing_pool if sharing else paged_pool)(64), max_batched_tokens=budget, max_batch_size=6)
    plain, again = request("plain", 20, 9), request("again", 30, 4, prompt_of="p")
    asked = [asking("p", 30), asking("one", 1), asking("q", 17, 0, n=3), asking("p2", 30, prompt_of="p")]
    outputs: dict[str, list[StepOutput]] = {each.request_id: [] for each in asked}
    engine.add_request(plain)
    for each in asked[:-1]:
        engine.submit(each, outputs[each.request_id].append)
    drain(engine)
    cached = engine.add_request(again)
    engine.submit(asked[-1], outputs["p2"].append)
    drain(engine)
    for each in asked:
        check(each, outputs[each.request_id])
    assert bool(cached.cached_tokens) == sharing, "what was scored can be found by others"
    assert cached.output_token_ids == expected_tokens(again)


def test_a_preempted_prompt_is_scored_once_more() -> None:
    engine = make_engine(sharing_pool(12), max_batched_tokens=24, admission_reserve=0.0)
    asked = [asking(f"r{number}", 18) for number in range(3)]
    asked = [replace(each, sampling=replace(each.sampling, max_tokens=20)) for each in asked]
    outputs: dict[str, list[StepOutput]] = {each.request_id: [] for each in asked}
    for each in asked:
        engine.submit(each, outputs[each.request_id].append)
    drain(engine)
    assert engine.stats().preemptions
    for each in asked:
        check(each, outputs[each.request_id])


def test_one_pass_for_each_sequence_gives_the_same() -> None:
    engine = make_engine(paged_pool(64), max_batched_tokens=16)
    engine._runner.executor = PerSequenceExecutor(engine._runner.executor)
    asked = [asking("a", 21), asking("b", 9)]
    outputs: dict[str, list[StepOutput]] = {each.request_id: [] for each in asked}
    engine.add_request(request("plain", 12, 9))
    for each in asked:
        engine.submit(each, outputs[each.request_id].append)
    drain(engine)
    for each in asked:
        check(each, outputs[each.request_id])


def test_too_many_alternatives_are_refused() -> None:
    with pytest.raises(RequestRefusedError, match="prompt_logprobs=21; at most 20"):
        make_engine().add_request(asking("a", 4, 21))
