"""A server whose requests share what they have in common."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from pytest_bdd import given, parsers, then, when

from features.steps.canary_steps import Canary
from features.steps.checkpoints import Checkpoint, random_tokens
from features.steps.server import Server
from features.steps.support import MemorySize, memory_size
from kvlab.config import SchedulerConfig
from kvlab.core import FinishReason
from tests.support.records import counted

_SIZE = {"Size": memory_size}


@given(parsers.parse("a server with {size:Size} that shares prefixes", extra_types=_SIZE), target_fixture="server")
def a_sharing_server(model: Checkpoint, scheduling: SchedulerConfig, size: MemorySize) -> Server:
    return Server.start(model, size, replace(scheduling), sharing=True)


@given(
    parsers.parse(
        "{count:d} requests of {prompt:d} prompt tokens, the first {same:d} of which are the same, "
        "and {output:d} output tokens"
    )
)
def requests_alike(server: Server, count: int, prompt: int, same: int, output: int) -> None:
    for index in range(count):
        server.submit(f"request-{index}", _behind(same, prompt - same, index), output)


@given(
    parsers.re(r"requests with the same (?P<prompt>\d+) prompt tokens and (?P<outputs>[\d, and]+) output tokens")
)
def requests_same(server: Server, prompt: str, outputs: str) -> None:
    for index, output in enumerate(re.findall(r"\d+", outputs)):
        server.submit(f"request-{index}", random_tokens(int(prompt), seed=7), int(output))


@given(
    parsers.parse(
        'requests of the tenants "{first}" and "{second}" with the same {prompt:d} prompt tokens '
        "and {output:d} output tokens"
    )
)
def requests_of_tenants(server: Server, first: str, second: str, prompt: int, output: int) -> None:
    for tenant in (first, second):
        server.submit(f"request-{tenant}", random_tokens(prompt, seed=7), output, salt=tenant)


@when(
    parsers.parse('a request "{name}" comes with the prompt of "{other}" and {output:d} output tokens'),
    target_fixture="canary",
)
def request_like(server: Server, name: str, other: str, output: int) -> Canary:
    server.submit(name, server.sequences[other].request.prompt_token_ids, output)
    return Canary(server.memory.storage.keys.clone(), server.memory.storage.values.clone())


@when(
    parsers.parse(
        "{count:d} prompts of {least:d} to {most:d} tokens behind the same {same:d} ask for {output:d} tokens each"
    )
)
def prompts_behind(server: Server, count: int, least: int, most: int, same: int, output: int) -> None:
    for index in range(count):
        own = least + (most - least) * index // (count - 1)
        server.submit(f"prompt-{index}", _behind(same, own, index), output)
    server.run()


@when("the same prompts are asked again")
def asked_again(server: Server) -> None:
    server.records.clear()
    for name, sequence in list(server.sequences.items()):
        request = sequence.request
        server.submit(f"{name}-again", request.prompt_token_ids, request.sampling.max_tokens)
    server.run()


@when(parsers.parse("the server steps until each has {count:d} tokens"))
def until_each_has(server: Server, count: int) -> None:
    server.step_until(lambda: all(s.num_output_tokens == count for s in server.sequences.values()))


@then(parsers.parse('"{name}" has failed'))
def has_failed(server: Server, name: str) -> None:
    assert server.sequences[name].finish_reason is FinishReason.FAILED
    assert "the device was lost" in str(server.sequences[name].error)


@then(
    parsers.parse(
        "that step computed {computed:d} prompt tokens, and found {found:d} in blocks that it filled itself"
    )
)
def found_in_step(server: Server, computed: int, found: int) -> None:
    record = server.records[-1]
    done = counted(record)
    assert (record.prefill_tokens, done.hit_tokens, done.same_step_hit_tokens) == (computed, found, found)


@then("that step computed 1 prompt token, and found all others in the cache")
def found_all_others(server: Server) -> None:
    record = server.records[-1]
    figures = (record.prefill_tokens, counted(record).hit_tokens, counted(record).same_step_hit_tokens)
    assert figures == (1, server.sequences["bob"].num_prompt_tokens - 1, 0)


@then(parsers.parse("the server computed {computed:d} prompt tokens, and found {found:d} in the cache"))
def found_in_all(server: Server, computed: int, found: int) -> None:
    assert sum(record.prefill_tokens for record in server.records) == computed
    assert sum(counted(record).hit_tokens for record in server.records) == found


@then(parsers.parse("{found:d} of their tokens were found in the cache"))
def found_again(server: Server, found: int) -> None:
    assert sum(counted(record).hit_tokens for record in server.records) == found


@then(parsers.parse('"{name}" found {found:d} of its prompt tokens in the cache'))
def request_found(server: Server, name: str, found: int) -> None:
    assert server.sequences[name].cached_tokens == found


@then(
    parsers.parse("a server with {size:Size} that shares nothing gives the same answers to all", extra_types=_SIZE)
)
def same_without_sharing(server: Server, model: Checkpoint, scheduling: SchedulerConfig, size: MemorySize) -> None:
    other = Server.start(model, size, replace(scheduling))
    for name, sequence in server.sequences.items():
        other.submit(name, sequence.request.prompt_token_ids, sequence.request.sampling.max_tokens)
    other.run()
    assert sum(counted(record).hit_tokens for record in other.records) == 0
    for name, sequence in server.sequences.items():
        assert other.sequences[name].output_token_ids == sequence.output_token_ids


@then("some were preempted, and found tokens again on their return")
def found_on_return(server: Server) -> None:
    assert sum(record.preempted for record in server.records) > 0
    assert sum(counted(record).recompute_hit_tokens for record in server.records) > 0


@then(parsers.re(r"that step allocated the (?P<count>\d+) blocks of the prompt and no other"))
def allocated_prompt(server: Server, count: str) -> None:
    assert counted(server.records[-1]).blocks_allocated == int(count)


@then(parsers.parse('"{first}" and "{second}" have the same first token'))
def same_first_token(server: Server, first: str, second: str) -> None:
    mine, yours = (server.sequences[name].output_token_ids for name in (first, second))
    assert mine[0] == yours[0]


@then("K and V of the prompt have not changed a bit")
def prompt_unchanged(server: Server, canary: Canary) -> None:
    storage = server.memory.storage
    (blocks,) = [blocks for blocks in server.history[-1].values() if blocks]
    assert torch.equal(storage.keys[:, blocks], canary.keys[:, blocks])
    assert torch.equal(storage.values[:, blocks], canary.values[:, blocks])


@then(parsers.parse("the prompt's {count:d} blocks were in use in each step until the last had ended"))
def prompt_in_use(server: Server, count: int) -> None:
    prompt = server.history[0]["request-0"][:count]
    holders = [{name for name, blocks in held.items() if blocks} for held in server.history]
    assert next(len(names) for names in holders if names) == len(server.sequences)
    assert {len(names) for names in holders} == set(range(len(server.sequences) + 1))
    for held, names in zip(server.history, holders, strict=True):
        assert all(held[name][:count] == prompt for name in names)


@then(parsers.parse("all of them have the same {count:d} blocks"))
def all_same_blocks(server: Server, count: int) -> None:
    first, *others = server.history[-1].values()
    assert len(first) == count
    assert others
    assert all(blocks == first for blocks in others)


def _behind(same: int, own: int, index: int) -> tuple[int, ...]:
    """A prompt whose first tokens all prompts have; the next differs from one prompt to the other."""
    rest = random_tokens(own, seed=100 + index)
    return (*random_tokens(same, seed=7), *((index, *rest[1:]) if own else ()))
