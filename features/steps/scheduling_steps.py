"""Who runs in a step: settings, requests as tables, and what the steps were."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from pytest_bdd import given, parsers, then, when

from features.steps.checkpoints import random_tokens
from features.steps.server import Server
from features.steps.support import names_in
from kvlab.config import PreemptionConfig, SchedulerConfig
from kvlab.core import FinishReason, SequenceStatus
from kvlab.errors import RequestRefusedError
from kvlab.hashed_prompt import TokenIds


@dataclass
class Refusal:
    """What was said to a request that was not taken."""

    text: str


@given(parsers.parse("scheduling with {settings}"), target_fixture="scheduling")
def scheduling_with(settings: str) -> SchedulerConfig:
    values: dict[str, Any] = {"max_batch_size": 8, "max_batched_tokens": 64}
    for setting in settings.split(", "):
        key, value = setting.split("=")
        if key == "preemption.victim":
            values["preemption"] = PreemptionConfig(value)
        else:
            values[key] = yaml.safe_load(value)
    return SchedulerConfig(**values)


@given("the requests")
@when("the requests arrive")
def the_requests(server: Server, datatable: list[list[str]]) -> None:
    head, *rows = datatable
    for row in rows:
        asked = dict(zip(head, row, strict=True))
        prompt: TokenIds = random_tokens(int(asked["prompt"]), seed=len(server.sequences))
        if asked.get("prompt of"):
            prompt = server.sequences[asked["prompt of"]].request.prompt_token_ids
        server.submit(
            asked["name"],
            prompt,
            int(asked["output"]),
            priority=int(asked.get("priority", 0)),
            deadline_s=float(asked["deadline"]) if "deadline" in asked else None,
        )


@given(parsers.re(r"(?P<count>\d+) requests of (?P<prompt>\d+) prompt tokens and (?P<output>\d+) output tokens?$"))
def equal_requests(server: Server, count: str, prompt: str, output: str) -> None:
    for index in range(int(count)):
        server.submit(f"request-{index}", random_tokens(int(prompt), seed=index), int(output))


@when(
    parsers.parse('a request "{name}" of {prompt:d} prompt tokens and {output:d} output tokens is refused'),
    target_fixture="refusal",
)
def is_refused(server: Server, name: str, prompt: int, output: int) -> Refusal:
    with pytest.raises(RequestRefusedError) as caught:
        server.submit(name, random_tokens(prompt, seed=99), output)
    assert name not in server.sequences
    return Refusal(str(caught.value))


@when(
    parsers.parse(
        "for {count:d} steps shorter, more urgent requests with a cached prompt never stop coming, so that "
        "{waiting:d} always wait"
    )
)
def never_stop_coming(server: Server, count: int, waiting: int) -> None:
    engine, prompt = server.engine, random_tokens(8, seed=-1)
    for _ in range(count):
        while len(engine.scheduler.waiting) <= waiting:
            name = f"other-{len(server.sequences)}"
            server.submit(name, prompt, 4, arrival_s=engine.clock.now(), deadline_s=1.0)
        server.step()


@then(parsers.re(r'"(?P<name>[\w-]+)" was complete within (?P<count>\d+) steps'))
def complete_within(server: Server, name: str, count: str) -> None:
    sequence = server.sequences[name]
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sum(record.end_s <= (sequence.finished_s or 0) for record in server.records) <= int(count)


@then(parsers.parse('"{name}" has not been admitted'))
def not_admitted(server: Server, name: str) -> None:
    assert server.sequences[name].scheduled_s is None


@when("the server steps until a sequence is preempted")
def until_a_sequence_is_preempted(server: Server) -> None:
    server.step_until(lambda: any(sequence.preemptions for sequence in server.sequences.values()))


@then(parsers.parse('its steps were "{steps}"'))
def steps_were(server: Server, steps: str) -> None:
    def text(part: tuple[str, int]) -> str:
        return part[0] if part[1] == 1 else f"{part[0]} {part[1]}"

    assert "; ".join(", ".join(map(text, each)) for each in server.passes) == steps


@then(parsers.parse("{running:d} run and {waiting:d} wait"))
def run_and_wait(server: Server, running: int, waiting: int) -> None:
    record = server.records[-1]
    assert (record.running, record.waiting) == (running, waiting)


@then(parsers.re(r"(?P<amount>no|some) sequences were preempted"))
def were_preempted(server: Server, amount: str) -> None:
    count = sum(sequence.preemptions for sequence in server.sequences.values())
    assert (count > 0) == (amount == "some")
    assert sum(record.preempted for record in server.records) == count


@then(parsers.parse("they entered in the order {names}"))
def entered_in_order(server: Server, names: str) -> None:
    entered = dict.fromkeys(name for name, _ in itertools.chain(*server.passes))
    assert list(entered) == names_in(names)


@then(parsers.parse('"{small}" entered in the step of "{large}", after "{running}" was complete'))
def entered_with(server: Server, small: str, large: str, running: str) -> None:
    entered = _first_pass(server, large)
    assert _first_pass(server, small) == entered
    assert all(running not in dict(each) for each in server.passes[entered:])


@then(parsers.parse('"{late}" entered after "{preempted}" had returned'))
def entered_after_return(server: Server, late: str, preempted: str) -> None:
    present = [preempted in dict(each) for each in server.passes]
    returned = present.index(True, present.index(False, present.index(True)))
    assert _first_pass(server, late) >= returned
    assert server.sequences[preempted].preemptions > 0


@then(parsers.parse('the refusal says "{text}"'))
def refusal_says(refusal: Refusal, text: str) -> None:
    assert text in refusal.text


@then(parsers.parse("no step had more than {budget:d} tokens, nor more than {threshold:d} of a prompt"))
def within_budget(server: Server, budget: int, threshold: int) -> None:
    assert max(record.prefill_tokens + record.decode_tokens for record in server.records) <= budget
    assert max(tokens for each in server.passes for _, tokens in each) <= threshold


@then("every decoding sequence was in every step, ahead of the prompts")
def decode_first(server: Server) -> None:
    """From its first token on a sequence takes part in every step until its end, with one token."""
    passes = iter(server.passes)
    computed = {name: sequence.cached_tokens for name, sequence in server.sequences.items()}
    decoded = 0
    for record in server.records:
        step: list[tuple[str, int]] = []
        while len(step) < record.batch_seqs:
            step += next(passes)
        decoding = {
            name
            for name, sequence in server.sequences.items()
            if sequence.num_prompt_tokens <= computed[name] < len(sequence.token_ids) - 1
        }
        assert {(name, 1) for name in decoding} == set(step[: len(decoding)])
        for name, tokens in step:
            computed[name] += tokens
        decoded += len(decoding)
    assert decoded == sum(sequence.num_output_tokens - 1 for sequence in server.sequences.values())


@then(parsers.parse('that is "{name}"'))
def the_preempted_is(server: Server, name: str) -> None:
    assert [each for each, sequence in server.sequences.items() if sequence.preemptions] == [name]


@then("it has the tokens that it was given, and no blocks")
def kept_its_tokens(server: Server) -> None:
    (name,) = [each for each, sequence in server.sequences.items() if sequence.preemptions]
    sequence = server.sequences[name]
    assert (sequence.status, sequence.num_computed, server.blocks(name)) == (SequenceStatus.WAITING, 0, [])
    assert sequence.output_token_ids == [output.token_id for output in server.outputs[name]]


@then("every token was output once")
def output_once_each(server: Server) -> None:
    for name, sequence in server.sequences.items():
        assert [output.token_id for output in server.outputs[name]] == sequence.output_token_ids


@then("the tokens computed again are counted")
def recomputed_counted(server: Server) -> None:
    computed: dict[str, int] = dict.fromkeys(server.sequences, 0)
    for name, tokens in itertools.chain(*server.passes):
        computed[name] += tokens
    for name, sequence in server.sequences.items():
        assert computed[name] - sequence.recomputed_tokens == len(sequence.token_ids) - 1
    assert sum(record.recomputed_tokens for record in server.records) == sum(
        sequence.recomputed_tokens for sequence in server.sequences.values()
    )


@then(parsers.parse("{failed} failed, since {names} did not fit"))
def failed_by_name(server: Server, failed: str, names: str) -> None:
    wanted = ", ".join(map(repr, names_in(names)))
    for name in names_in(failed):
        sequence = server.sequences[name]
        assert sequence.finish_reason is FinishReason.FAILED
        assert (sequence.error or "").endswith(f"did not fit: {wanted}")


def _first_pass(server: Server, name: str) -> int:
    return next(index for index, each in enumerate(server.passes) if name in dict(each))
