"""Several samples of one prompt."""

from __future__ import annotations

from dataclasses import replace

from pytest_bdd import given, parsers, then, when

from features.steps.checkpoints import Checkpoint, random_tokens
from features.steps.server import Server
from features.steps.support import MemorySize
from kvlab.config import SchedulerConfig
from kvlab.core import FinishReason, SamplingParams, Sequence


@given(
    parsers.parse(
        'a request "{name}" of {prompt:d} prompt tokens and {output:d} output tokens in {samples:d} samples'
    )
)
def a_request_for_samples(server: Server, name: str, prompt: int, output: int, samples: int) -> None:
    sampling = SamplingParams(output, temperature=1.0, seed=11, n=samples)
    server.submit(name, random_tokens(prompt, seed=len(server.sequences)), output, sampling=sampling)


@given(
    parsers.parse(
        'a request "{name}" of {prompt:d} prompt tokens and {output:d} output tokens in {samples:d} greedy samples'
    )
)
def a_request_for_greedy_samples(server: Server, name: str, prompt: int, output: int, samples: int) -> None:
    sampling = SamplingParams(output, n=samples)
    server.submit(name, random_tokens(prompt, seed=len(server.sequences)), output, sampling=sampling)


@when("the server steps until the samples run")
def until_samples_run(server: Server) -> None:
    server.step_until(lambda: all(sample.slot is not None for sample in _samples(server)))


@when("the server steps until the samples have diverged")
def until_diverged(server: Server) -> None:
    server.step_until(lambda: all(s.num_computed > s.num_prompt_tokens for s in _samples(server)))


@then(parsers.parse("the samples have the same {count:d} blocks, and {used:d} blocks are in use"))
def same_blocks(server: Server, count: int, used: int) -> None:
    first, *others = _tables(server)
    assert len(first) == count
    assert all(table == first for table in others)
    assert server.memory.pool.stats().blocks_in_use == used


@then(parsers.parse("the samples have the same first {full:d} blocks and {own:d} of their own each"))
def own_tails(server: Server, full: int, own: int) -> None:
    tables = _tables(server)
    assert all(table[:full] == tables[0][:full] for table in tables)
    tails = [block for table in tables for block in table[full:]]
    assert len(tails) == len(set(tails)) == own * len(tables)
    assert server.memory.pool.stats().blocks_in_use == full + len(tails)


@then("the prompt was computed once, and its last token once more for each further sample")
def prompt_once(server: Server) -> None:
    samples = _samples(server)
    computed = sum(record.prefill_tokens for record in server.records)
    assert computed == samples[0].num_prompt_tokens + len(samples) - 1


@then("the samples are not all alike")
def not_alike(server: Server) -> None:
    assert len({tuple(sample.output_token_ids) for sample in _samples(server)}) > 1


@then("each sample is what transformers generates, token for token")
def samples_equal_reference(server: Server, model: Checkpoint) -> None:
    for sample in _samples(server):
        assert len(sample.output_token_ids) == sample.request.sampling.max_tokens
        assert sample.output_token_ids == model.greedy(sample.request.prompt_token_ids, sample.output_token_ids)


@then("contiguous memory gives the same samples")
def same_in_contiguous(server: Server, model: Checkpoint, scheduling: SchedulerConfig) -> None:
    """Where a fork is a copy of everything."""
    other = Server.start(model, MemorySize(8, 64, paged=False), replace(scheduling))
    for name, sequence in server.sequences.items():
        request = sequence.request
        other.submit(name, request.prompt_token_ids, request.sampling.max_tokens, sampling=request.sampling)
    other.run()
    for mine, theirs in zip(_samples(server), _samples(other), strict=True):
        assert mine.finish_reason is theirs.finish_reason is FinishReason.LENGTH
        assert mine.output_token_ids == theirs.output_token_ids


def _samples(server: Server) -> list[Sequence]:
    return [sample for first in server.sequences.values() for sample in (first, *first.siblings)]


def _tables(server: Server) -> list[list[int]]:
    return [server.memory.pool.tables.blocks(s.slot) for s in _samples(server) if s.slot is not None]
