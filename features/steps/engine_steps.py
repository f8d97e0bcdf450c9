"""A server with a real model: requests, steps, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from pytest_bdd import given, parsers, then, when

from features.steps.checkpoints import Checkpoint, Checkpoints, random_tokens
from features.steps.server import Server
from features.steps.support import Memory, MemorySize, memory_size
from kvlab.config import SchedulerConfig
from kvlab.core import FinishReason, SequenceStatus, StepOutput
from tests.support.records import counted

_SIZE = {"Size": memory_size}


@dataclass
class Comparison:
    """Two servers of one model that are given the same requests."""

    contiguous: Server
    paged: Server


@pytest.fixture
def scheduling() -> SchedulerConfig:
    return SchedulerConfig(max_batch_size=8, max_batched_tokens=64)


@pytest.fixture
def memory(server: Server) -> Memory:
    """The memory of the scenario's server, where the scenario has no pool of its own."""
    return server.memory


@given(parsers.parse('the model "{name}"'), target_fixture="model")
def the_model(checkpoints: Checkpoints, name: str) -> Checkpoint:
    return checkpoints.get(name)


@given(parsers.parse("batches of up to {count:d} sequences"))
def batch_limit(scheduling: SchedulerConfig, count: int) -> None:
    scheduling.max_batch_size = count
    scheduling.max_batched_tokens = max(count, scheduling.max_batched_tokens)


@given(parsers.parse("steps of up to {count:d} tokens"))
def step_limit(scheduling: SchedulerConfig, count: int) -> None:
    scheduling.max_batched_tokens = count


@given("no admission reserve")
def no_reserve(scheduling: SchedulerConfig) -> None:
    scheduling.admission_reserve = 0.0


@given(parsers.parse("a server with {size:Size}", extra_types=_SIZE), target_fixture="server")
def a_server(model: Checkpoint, scheduling: SchedulerConfig, size: MemorySize) -> Server:
    return Server.start(model, size, replace(scheduling))


@given(
    parsers.parse("servers with {first:Size} and with {second:Size}", extra_types=_SIZE), target_fixture="servers"
)
def two_servers(
    model: Checkpoint, scheduling: SchedulerConfig, first: MemorySize, second: MemorySize
) -> Comparison:
    contiguous, paged = (Server.start(model, size, replace(scheduling)) for size in (first, second))
    assert not contiguous.memory.pool.is_paged()
    assert paged.memory.pool.is_paged()
    return Comparison(contiguous, paged)


@given(parsers.parse('a request "{name}" of {prompt:d} prompt tokens and {output:d} output tokens'))
def a_request(server: Server, name: str, prompt: int, output: int) -> None:
    server.submit(name, random_tokens(prompt, seed=len(server.sequences)), output)


@given(
    parsers.parse(
        'a request "{name}" of {prompt:d} prompt tokens and {output:d} output tokens, '
        'whose callback aborts "{other}" at token {number:d}'
    )
)
def a_request_that_aborts(server: Server, name: str, prompt: int, output: int, other: str, number: int) -> None:
    def read(_: StepOutput) -> None:
        if len(server.outputs[name]) == number:
            server.engine.abort(other)

    server.submit(name, random_tokens(prompt, seed=len(server.sequences)), output, read)


@when(
    parsers.re(
        r"(?P<count>\d+) requests? of (?P<prompt>\d+) prompt tokens and (?P<output>\d+) output tokens "
        r"(is|are) served"
    ),
    converters=dict.fromkeys(("count", "prompt", "output"), int),
)
def requests_are_served(server: Server, count: int, prompt: int, output: int) -> None:
    for index in range(count):
        server.submit(f"request-{index}", random_tokens(prompt, seed=index), output)
    server.run()


@when(parsers.parse("both serve {count:d} requests of {prompt:d} prompt tokens and {output:d} output tokens"))
def both_serve(servers: Comparison, count: int, prompt: int, output: int) -> None:
    for server in (servers.contiguous, servers.paged):
        requests_are_served(server, count, prompt, output)


@when(parsers.parse("{count:d} prompts of {least:d} to {most:d} tokens ask for {output:d} tokens each"))
def prompts_of_mixed_length(server: Server, count: int, least: int, most: int, output: int) -> None:
    for index in range(count):
        length = least + (most - least) * index // (count - 1)
        server.submit(f"prompt-{index}", random_tokens(length, seed=index), output)
    server.run()


@when(parsers.parse('the server steps until "{name}" is complete'))
def until_complete(server: Server, name: str) -> None:
    server.step_until(lambda: server.sequences[name].finish_reason is not None)
    assert server.sequences[name].finish_reason is FinishReason.LENGTH


@when(parsers.parse('the server steps until "{name}" is aborted after {tokens:d} tokens'))
def until_aborted(server: Server, name: str, tokens: int) -> None:
    server.step_until(lambda: server.sequences[name].num_output_tokens == tokens)
    assert server.engine.abort(name)


@when(parsers.parse('the server steps until "{name}" is evicted'))
def until_evicted(server: Server, name: str) -> None:
    server.step_until(lambda: server.sequences[name].preemptions > 0)


@when("the server steps once")
def steps_once(server: Server) -> None:
    assert server.step() is not None


@when(parsers.parse("the server steps {count:d} times"))
def steps_times(server: Server, count: int) -> None:
    for _ in range(count):
        assert server.step() is not None


@when("the server steps until it has no work")
def until_no_work(server: Server) -> None:
    server.run()


@then(parsers.parse('"{name}" is waiting'))
def is_waiting(server: Server, name: str) -> None:
    assert server.sequences[name].status is SequenceStatus.WAITING
    assert server.blocks(name) == []


@then(parsers.re(r'"(?P<name>\w+)" runs in (a block|blocks) that "(?P<other>\w+)" held'))
def runs_in_blocks_of(server: Server, name: str, other: str) -> None:
    sequence = server.sequences[name]
    taken = set(server.blocks(name)) - set(server.held[name])
    assert sequence.status is SequenceStatus.RUNNING
    assert sequence.num_computed > 0
    assert taken & set(server.held[other])


@then(parsers.parse("that step freed {freed:d} blocks and allocated {allocated:d}"))
def step_blocks(server: Server, freed: int, allocated: int) -> None:
    counters = counted(server.records[-1])
    assert (counters.blocks_freed, counters.blocks_allocated) == (freed, allocated)


@then("every block is free")
def every_block_free(server: Server) -> None:
    pool = server.memory.pool
    assert server.memory.free_blocks() == set(range(pool.allocator.num_blocks))
    assert pool.free_slot_count() == pool.allocator.num_blocks


@then(parsers.parse("every request got its {count:d} tokens"))
def every_request_complete(server: Server, count: int) -> None:
    for sequence in server.sequences.values():
        assert sequence.finish_reason is FinishReason.LENGTH
        assert sequence.num_output_tokens == count


@then(parsers.parse('"{first}" and "{second}" each ended once'))
def ended_once(server: Server, first: str, second: str) -> None:
    for name in (first, second):
        outputs = server.outputs[name]
        assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        tokens = [output.token_id for output in outputs if output.token_id is not None]
        assert tokens == server.sequences[name].output_token_ids


@then("every answer is what transformers generates, token for token")
def tokens_equal_reference(server: Server, model: Checkpoint) -> None:
    assert server.sequences
    for name in server.sequences:
        answer_equals_reference(server, model, name)


@then(parsers.parse('"{name}" got what transformers generates, token for token'))
def answer_equals_reference(server: Server, model: Checkpoint, name: str) -> None:
    sequence = server.sequences[name]
    request = sequence.request
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.num_output_tokens == request.sampling.max_tokens
    assert sequence.output_token_ids == model.greedy(request.prompt_token_ids, sequence.output_token_ids)


@then(parsers.parse("at least {count:d} requests lost their blocks and were computed again"))
def preempted(server: Server, count: int) -> None:
    again = [sequence for sequence in server.sequences.values() if sequence.recomputed_tokens]
    assert len(again) >= count
    assert all(sequence.preemptions for sequence in again)
    assert sum(record.recomputed_tokens for record in server.records) == sum(s.recomputed_tokens for s in again)


@then(parsers.parse("both have {size:d} bytes for K and V"))
def same_bytes(servers: Comparison, size: int) -> None:
    for server in (servers.contiguous, servers.paged):
        storage = server.memory.storage
        assert storage.keys.nbytes + storage.values.nbytes == server.memory.pool.stats().kv_bytes == size


@then(parsers.parse("the contiguous one ran {contiguous:d} sequences at once, the paged one at least {paged:d}"))
def peak_running(servers: Comparison, contiguous: int, paged: int) -> None:
    peaks = [max(record.running for record in s.records) for s in (servers.contiguous, servers.paged)]
    assert peaks[0] == contiguous
    assert peaks[1] >= paged


@then("both answer what transformers generates, token for token")
def both_equal_reference(servers: Comparison, model: Checkpoint) -> None:
    for server in (servers.contiguous, servers.paged):
        tokens_equal_reference(server, model)
