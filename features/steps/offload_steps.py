"""A pool with slower memory behind it: prompts that come again after others have taken their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pytest_bdd import given, parsers, then, when

from kvlab.core import FinishReason, Sequence, SequenceStatus
from kvlab.engine.core import EngineCore
from kvlab.kv.tiers.base import key_behind
from tests.support.engines import drain, make_engine, request, run, step_until
from tests.support.model import expected_tokens, prompt_for
from tests.support.tiers import SlowStore, tiered_pool


@dataclass
class Tiered:
    """An engine, the memory behind its pool if it is slow, and what became of each prompt."""

    engine: EngineCore
    store: SlowStore = field(default_factory=SlowStore)
    asked: dict[str, list[Sequence]] = field(default_factory=dict)
    waiting: list[Sequence] = field(default_factory=list)
    beside: Sequence | None = None

    def names(self) -> Iterator[str]:
        """Of requests to come."""
        number = sum(map(len, self.asked.values()))
        while True:
            number += 1
            yield f"request {number}"

    def ask(self, name: str, prompt: int, output: int) -> None:
        """Answer a prompt to its end."""
        self.asked.setdefault(name, []).extend(
            run(self.engine, request(next(self.names()), prompt, output, prompt_of=name))
        )


@given(
    parsers.parse("a pool of {blocks:d} blocks of 4 tokens, with host memory for {room:d} more"),
    target_fixture="tiered",
)
def with_host_memory(blocks: int, room: int) -> Tiered:
    return Tiered(make_engine(tiered_pool(blocks, room)))


@given(
    parsers.parse("a pool of {blocks:d} blocks of 4 tokens, with slow memory behind it"), target_fixture="tiered"
)
def with_slow_memory(blocks: int) -> Tiered:
    store = SlowStore()
    return Tiered(make_engine(tiered_pool(blocks, 0, store)), store)


@when(parsers.parse('a prompt "{name}" of {prompt:d} tokens is answered with {output:d} tokens'))
def prompt_answered(tiered: Tiered, name: str, prompt: int, output: int) -> None:
    tiered.ask(name, prompt, output)


@when(parsers.parse("{count:d} prompts of {prompt:d} tokens are answered with {output:d} tokens"))
def others_answered(tiered: Tiered, count: int, prompt: int, output: int) -> None:
    for number in range(count):
        tiered.ask(f"other {number}", prompt, output)


@when(parsers.parse('the prompt "{name}" is asked again'))
def prompt_asked_again(tiered: Tiered, name: str) -> None:
    first = tiered.asked[name][0]
    tiered.ask(name, first.num_prompt_tokens, first.num_output_tokens)


@when("the slow memory stops")
def stops(tiered: Tiered) -> None:
    tiered.store.gate.clear()


@when(parsers.parse('the prompt "{name}" is asked again {count:d} times beside another'))
def asked_beside(tiered: Tiered, name: str, count: int) -> None:
    first = tiered.asked[name][0]
    for number in range(count):
        again = request(f"again {number}", first.num_prompt_tokens, first.num_output_tokens, prompt_of=name)
        tiered.waiting.append(tiered.engine.add_request(again))
    tiered.asked[name] += tiered.waiting
    tiered.beside = tiered.engine.add_request(request("beside", 12, 8))


@when(parsers.parse('the slow memory loses the block of tokens {first:d} to {last:d} of "{name}"'))
def loses(tiered: Tiered, first: int, last: int, name: str) -> None:
    prompt, index = prompt_for(name, 40), tiered.engine.pool.index  # type: ignore[attr-defined]
    key = key_behind(b"", b"None")
    for part in index.parts(prompt[: last + 1], 0):
        key = key_behind(key, part)
    assert first % 4 == 0
    assert key in tiered.store.pages
    tiered.store.broken.add(key)


@then(parsers.parse("the other is answered while those {count:d} are being loaded"))
def other_is_answered(tiered: Tiered, count: int) -> None:
    beside = tiered.beside
    assert beside is not None
    step_until(tiered.engine, lambda: beside.finish_reason is FinishReason.LENGTH)
    assert [sequence.status for sequence in tiered.waiting] == [SequenceStatus.LOADING] * count


@then(parsers.parse('both answers to "{name}" are those of the model without a cache'))
def as_without_a_cache(tiered: Tiered, name: str) -> None:
    assert len(tiered.asked[name]) > 1
    for sequence in tiered.asked[name]:
        assert sequence.output_token_ids == expected_tokens(sequence.request)


@then(parsers.parse('once the slow memory goes on both answers to "{name}" are those of the model without a cache'))
def goes_on(tiered: Tiered, name: str) -> None:
    tiered.store.gate.set()
    drain(tiered.engine)
    as_without_a_cache(tiered, name)


@then(parsers.parse("{count:d} of its tokens were not computed"))
def not_computed(tiered: Tiered, count: int) -> None:
    assert tiered.asked["a"][-1].cached_tokens == count


@then(parsers.parse("{count:d} tokens were found in host memory"))
def found_in_host_memory(tiered: Tiered, count: int) -> None:
    assert tiered.engine.pool.counters().host_hit_tokens == count


@then(parsers.parse("its {blocks:d} blocks were loaded once for all {count:d}"))
def loaded_once(tiered: Tiered, blocks: int, count: int) -> None:
    counters = tiered.engine.pool.counters()
    assert counters.disk_loaded_blocks == blocks
    assert counters.disk_hit_tokens == count * 4 * blocks


@then(parsers.parse("{count:d} block was lost"))
def was_lost(tiered: Tiered, count: int) -> None:
    assert tiered.engine.pool.counters().failed_pages == count
