"""Texts that begin alike, and the blocks they share."""

from __future__ import annotations

import pytest
import torch
from pytest_bdd import given, parsers, then, when

from features.steps.support import NAMES, SPEC, MemorySize, memory_size, names_in
from features.steps.texts import Texts, pool_state
from kvlab.errors import OutOfBlocksError
from tests.support.pools import collide

_SIZE = {"Size": memory_size}
_HASHES = {
    "every hash is the same": lambda tokens: 7,
    "a block's hash is its first byte": lambda tokens: tokens[0],
    "hashes are one of three": lambda tokens: sum(tokens) % 3,
}


@given(parsers.parse("a pool of {size:Size} that shares prefixes", extra_types=_SIZE), target_fixture="memory")
def a_sharing_pool(size: MemorySize) -> Texts:
    return Texts(size.build(SPEC, sharing=True))


@given(
    parsers.parse("a pool of {size:Size} that shares prefixes and keeps equal blocks", extra_types=_SIZE),
    target_fixture="memory",
)
def a_pool_with_copies(size: MemorySize) -> Texts:
    return Texts(size.build(SPEC, sharing=True, merge=False))


@given(
    parsers.parse("a pool of {size:Size} that shares prefixes and evicts by {policy}", extra_types=_SIZE),
    target_fixture="memory",
)
def a_sharing_pool_with(size: MemorySize, policy: str) -> Texts:
    return Texts(size.build(SPEC, sharing=True, eviction=policy))


@given(
    parsers.parse("a pool of {size:Size} that shares prefixes, where {collision}", extra_types=_SIZE),
    target_fixture="memory",
)
def a_colliding_pool(size: MemorySize, collision: str) -> Texts:
    pool = size.build(SPEC, sharing=True)
    assert pool.shares_prefixes
    collide(pool.index, _HASHES[collision])
    return Texts(pool)


@given(parsers.parse("a pool of {size:Size} holding texts", extra_types=_SIZE), target_fixture="memory")
def a_plain_pool(size: MemorySize) -> Texts:
    return Texts(size.build(SPEC))


@given(parsers.parse('a text "{name}" of {tokens:d} tokens'))
@when(parsers.parse('a text "{name}" of {tokens:d} tokens arrives'))
def a_text(memory: Texts, name: str, tokens: int) -> None:
    memory.arrive(name, memory.new_tokens_of(tokens))


@given(parsers.parse('a text "{name}" of {tokens:d} tokens, under the salt "{salt}"'))
def a_salted_text(memory: Texts, name: str, tokens: int, salt: str) -> None:
    memory.arrive(name, memory.new_tokens_of(tokens), _salt(salt))


@given(parsers.parse("texts of {tokens:d} tokens were stored and freed: {names}"))
def texts_came_and_went(memory: Texts, tokens: int, names: str) -> None:
    for name in names_in(names):
        memory.arrive(name, memory.new_tokens_of(tokens))
        memory.end(name)


@given(parsers.parse('a text "{name}" of {tokens:d} tokens was stored and freed'))
@when(parsers.parse('a text "{name}" of {tokens:d} tokens is stored and freed'))
def came_and_went(memory: Texts, name: str, tokens: int) -> None:
    memory.arrive(name, memory.new_tokens_of(tokens))
    memory.end(name)


@given(parsers.parse('a text "{name}" of {tokens:d} tokens whose first {same:d} are those of "{other}"'))
@when(parsers.parse('a text "{name}" of {tokens:d} tokens arrives whose first {same:d} are those of "{other}"'))
def a_text_like(memory: Texts, name: str, tokens: int, same: int, other: str) -> None:
    memory.arrive(name, _like(memory, other, same, tokens))


@given(
    parsers.parse(
        'a text "{name}" of {tokens:d} tokens was stored and freed whose first {same:d} are those of "{other}"'
    )
)
def a_text_like_came_and_went(memory: Texts, name: str, tokens: int, same: int, other: str) -> None:
    memory.arrive(name, _like(memory, other, same, tokens))
    memory.end(name)


@when(parsers.re(r'a text "(?P<name>\w+)" of (?P<tokens>\d+) tokens? tries to enter'), target_fixture="refusal")
def a_new_text_tries(memory: Texts, name: str, tokens: str) -> OutOfBlocksError:
    return _refused(memory, name, memory.new_tokens_of(int(tokens)))


@when(
    parsers.parse(
        'a text "{name}" of {tokens:d} tokens tries to enter whose first {same:d} are those of "{other}"'
    ),
    target_fixture="refusal",
)
def a_text_tries(memory: Texts, name: str, tokens: int, same: int, other: str) -> OutOfBlocksError:
    return _refused(memory, name, _like(memory, other, same, tokens))


@when(parsers.parse('a text "{name}" arrives with the tokens of "{other}", under the salt "{salt}"'))
def a_salted_copy(memory: Texts, name: str, other: str, salt: str) -> None:
    memory.arrive(name, memory.tokens[other], _salt(salt))


@given(parsers.parse('a text "{name}" with the tokens of "{other}"'))
@when(parsers.parse('a text "{name}" arrives with the tokens of "{other}"'))
def a_copy(memory: Texts, name: str, other: str) -> None:
    memory.arrive(name, memory.tokens[other])


@given(parsers.parse('a text "{name}" with the tokens of "{other}" was stored and freed'))
@when(parsers.parse('a text "{name}" with the tokens of "{other}" is stored and freed'))
def a_copy_came_and_went(memory: Texts, name: str, other: str) -> None:
    memory.arrive(name, memory.tokens[other])
    memory.end(name)


@when(
    parsers.parse(
        'a text "{name}" of {tokens:d} tokens arrives that begins as "{start}" for {count:d}, '
        'and then goes on as "{other}"'
    )
)
def same_behind_another_start(memory: Texts, name: str, tokens: int, start: str, count: int, other: str) -> None:
    memory.arrive(name, [*memory.tokens[start][:count], *memory.tokens[other][count:tokens]])


@when(parsers.parse('a text "{name}" arrives that says the first {tokens:d} tokens of "{other}" {times:d} times'))
def repeats(memory: Texts, name: str, tokens: int, other: str, times: int) -> None:
    memory.arrive(name, memory.tokens[other][:tokens] * times)


@given(parsers.parse("{names} are opened with the same {tokens:d} tokens"))
def opened_alike(memory: Texts, names: str, tokens: int) -> None:
    text = memory.new_tokens_of(tokens)
    for name in names_in(names):
        memory.open_text(name, text)


@given(parsers.parse("{names} go on with the same {tokens:d} tokens"))
@when(parsers.parse("{names} go on with the same {tokens:d} tokens"))
def go_on_alike(memory: Texts, names: str, tokens: int) -> None:
    """What they compute next is known, and the same for all."""
    first, *others = names_in(names)
    memory.know(first, len(memory.tokens[first]) + tokens)
    for name in others:
        memory.know(name, len(memory.tokens[name]) + tokens, like=first)


@given(parsers.re(NAMES + r' have what "(?P<other>\w+)" has, (?P<how>by their prompt|as forks)'))
def have_the_same(memory: Texts, names: str, other: str, how: str) -> None:
    for name in names_in(names):
        if how == "as forks":
            memory.fork(name, other)
        else:
            memory.arrive(name, memory.tokens[other])


@then("the one that is left reads back what it wrote")
def last_reads_back(memory: Texts) -> None:
    (name,) = memory.slots.keys() - {"stranger"}
    assert torch.equal(memory.read(name), memory.written[name])


@when("the one that is left ends")
def last_ends(memory: Texts) -> None:
    (name,) = memory.slots.keys() - {"stranger"}
    memory.end(name)


@when(parsers.parse("{names} compute {tokens:d} tokens in the same step"))
def compute_together(memory: Texts, names: str, tokens: int) -> None:
    memory.step(dict.fromkeys(names_in(names), tokens))


@when(parsers.parse("{names} compute {tokens:d} tokens, one in each step"))
def compute_one_by_one(memory: Texts, names: str, tokens: int) -> None:
    for _ in range(tokens):
        memory.step(dict.fromkeys(names_in(names), 1))


@when(parsers.parse('a step fails that computes the {tokens:d} tokens of a new text "{name}"'))
def a_step_fails(memory: Texts, tokens: int, name: str) -> None:
    """It is given up half-way: the first layer's K and V are written, the second's are not."""
    memory.open(name, tokens)
    view = memory.pool.view([memory.slots[name]], [tokens])
    half = memory.content(memory.tokens[name])
    view.update(0, half[:, 0, 0], half[:, 0, 1])
    view.rollback()
    memory.audit()


@when(parsers.parse('a step fails in which "{name}" computes {tokens:d} token'))
def a_step_of_fails(memory: Texts, name: str, tokens: int) -> None:
    memory.know(name, memory.length(name) + tokens)
    memory.pool.view([memory.slots[name]], [tokens]).rollback()
    memory.audit()


@then(
    parsers.re(NAMES + r" shares? (?P<count>no|\d+) blocks? with " + NAMES.replace("names", "others")),
    converters={"names": names_in, "others": names_in},
)
def share_blocks(memory: Texts, names: list[str], count: str, others: list[str]) -> None:
    for name in names:
        for other in others:
            assert memory.shared_entries(name, other) == (0 if count == "no" else int(count))


@then(parsers.parse('"{name}" found {found:d} of its tokens in the cache and computed {computed:d}'))
def found_and_computed(memory: Texts, name: str, found: int, computed: int) -> None:
    assert (memory.found[name], memory.computed[name]) == (found, computed)


@then(parsers.re(r"(?P<count>\d+) blocks? (is|are) in use"), converters={"count": int})
def blocks_in_use(memory: Texts, count: int) -> None:
    assert memory.pool.stats().blocks_in_use == len(memory.pool.allocator.allocated_block_ids()) == count


@then(parsers.re(r"(?P<count>\d+) blocks? (was|were) given back because an equal one was there"))
def merged(memory: Texts, count: str) -> None:
    assert memory.pool.counters().merged_blocks == int(count)


@then(parsers.re(r'the first (?P<count>\d+) blocks of "(?P<name>\w+)" are cached, and no more'))
def cached_exactly(memory: Texts, count: str, name: str) -> None:
    assert memory.cached_blocks(name) == int(count)


@then("nothing has changed")
def nothing_changed(memory: Texts) -> None:
    assert memory.state
    assert pool_state(memory) == memory.state
    memory.audit()


def _refused(memory: Texts, name: str, tokens: list[int]) -> OutOfBlocksError:
    memory.state = pool_state(memory)
    with pytest.raises(OutOfBlocksError) as refused:
        memory.open_text(name, tokens)
    return refused.value


def _like(memory: Texts, other: str, same: int, tokens: int) -> list[int]:
    assert len(memory.tokens[other]) >= same
    return [*memory.tokens[other][:same], *memory.new_tokens_of(tokens - same)]


def _salt(text: str) -> str | None:
    return None if text == "none" else text
