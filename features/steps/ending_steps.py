"""How an answer ends: by itself, or because its user took it back."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from pytest_bdd import given, parsers, then, when

from features.steps.scripted import ScriptedModel
from features.steps.server import Server
from features.steps.support import names_in
from kvlab.config import SpeculationConfig
from kvlab.core import FinishReason, SamplingParams, Sequence, SequenceStatus

#: Where a request can be when it is aborted.
STATES: dict[str, Callable[[Sequence], bool]] = {
    "waiting": lambda s: s.status is SequenceStatus.WAITING and not s.preemptions,
    "in prefill": lambda s: s.status is SequenceStatus.RUNNING and 0 < s.num_computed < s.num_prompt_tokens,
    "in decode": lambda s: s.status is SequenceStatus.RUNNING and s.num_output_tokens == 5,
    "preempted": lambda s: s.status is SequenceStatus.WAITING and s.preemptions > 0,
}


@given(parsers.parse('a model that says "{script}"'), target_fixture="scripted")
def a_model_that_says(script: str) -> ScriptedModel:
    return ScriptedModel(tuple(script.split("|")))


@given(parsers.parse("the same model, whose tokens are looked up {most:d} at a time"), target_fixture="scripted")
def with_lookup(scripted: ScriptedModel, most: int) -> ScriptedModel:
    return ScriptedModel(scripted.script, SpeculationConfig("ngram", num_speculative_tokens=most))


@when(
    parsers.re(r"a request asks for (?P<limit>up to|\d+ to) (?P<most>\d+) tokens(?P<how>.*)"),
    target_fixture="answer",
)
def a_request_asks(scripted: ScriptedModel, limit: str, most: str, how: str) -> Sequence:
    sampling = SamplingParams(int(most), ignore_eos="ignoring the end of sequence" in how)
    if limit != "up to":
        sampling = replace(sampling, min_tokens=int(limit.split()[0]))
    if match := re.search(r'stop token "([^"]+)"', how):
        sampling = replace(sampling, stop_token_ids=(scripted.token(match[1]),))
    if match := re.search(r"stop strings? (.*)", how):
        sampling = replace(sampling, stop=tuple(names_in(match[1])))
    return scripted.ask(sampling)


@when(parsers.parse('the server steps with "{name}" {state}'))
def steps_with(server: Server, name: str, state: str) -> None:
    """The server steps until the request is there; at least once."""
    server.step()
    server.step_until(lambda: STATES[state](server.sequences[name]))


@when(parsers.parse('"{name}" is aborted'))
def is_aborted(server: Server, name: str) -> None:
    assert server.engine.abort(name)
    assert not server.engine.abort(name)


@then(parsers.parse('the answer has {count:d} tokens and ended by "{reason}"'))
def answer_ended(answer: Sequence, count: int, reason: str) -> None:
    assert (answer.num_output_tokens, answer.finish_reason) == (count, FinishReason(reason))


@then(parsers.re(r'its text is "(?P<text>.*)"'))
def its_text(answer: Sequence, text: str) -> None:
    assert answer.text == text


@then("the text came piece by piece, none of it taken back")
def piece_by_piece(scripted: ScriptedModel, answer: Sequence) -> None:
    assert "".join(output.text for output in scripted.outputs) == answer.text
    assert [output.token_id for output in scripted.outputs] == answer.output_token_ids
    assert [output.finish_reason for output in scripted.outputs[:-1]] == [None] * (len(scripted.outputs) - 1)


@then(
    parsers.parse(
        "it took {steps:d} forward passes, in which {accepted:d} of {proposed:d} proposed tokens were accepted"
    )
)
def passes_of_an_answer(scripted: ScriptedModel, steps: int, accepted: int, proposed: int) -> None:
    records = [record for record in scripted.records if record.batch_seqs]
    assert len(records) == steps
    assert sum(record.accepted_tokens for record in records) == accepted
    assert sum(record.proposed_tokens for record in records) == proposed


@then(parsers.parse("its outputs carry the texts {texts}"))
def texts_of_outputs(scripted: ScriptedModel, texts: str) -> None:
    assert [output.text for output in scripted.outputs] == re.findall(r'"([^"]*)"', texts)


@then(parsers.parse('only "{name}" holds blocks'))
def only_holder(server: Server, name: str) -> None:
    assert server.memory.pool.allocator.allocated_block_ids() == set(server.blocks(name))
    assert server.blocks(name)


@then(parsers.parse('"{name}" got one output that says it was aborted'))
def aborted_once(server: Server, name: str) -> None:
    """Each of its samples was."""
    ends = [output for output in server.outputs[name] if output.finish_reason is not None]
    assert [output.finish_reason for output in ends] == [FinishReason.ABORTED] * len(ends)
    assert sorted(output.index for output in ends) == list(range(server.sequences[name].request.sampling.n))
