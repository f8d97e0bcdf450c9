"""A model that fails, and what its failure costs whom."""

from __future__ import annotations

from collections.abc import Callable

import torch
from pytest_bdd import given, parsers, then, when

from features.steps.checkpoints import Checkpoint
from features.steps.server import Server
from kvlab.core import FinishReason, SequenceSpec
from kvlab.engine.sampler import Sampler
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.view import CacheView
from tests.support.commands import Command

Strikes = Callable[[StepInput], list[SequenceSpec]]


class Fault:
    """Strikes the passes in which there are culprits: `before it computes`, `half-way` (the first layer's K and V
    are garbage), or `with logits that are no numbers`.
    """

    def __init__(self, server: Server, when: str, culprits: Strikes) -> None:
        self._server, self._when, self._culprits = server, when, culprits
        self._execute = server.executor.execute
        server.executor.execute = self.execute  # type: ignore[method-assign]

    def end(self) -> None:
        self._server.executor.execute = self._execute  # type: ignore[method-assign]

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        culprits = self._culprits(step)
        if not culprits:
            return self._execute(step, view)
        if self._when == "before it computes":
            raise RuntimeError("the device was lost")
        spec = view.storage.spec
        garbage = torch.full((view.num_tokens, spec.num_kv_heads, spec.head_dim), float("nan"))
        for layer in range(1 if self._when == "half-way" else spec.num_layers):
            view.update(layer, garbage, garbage)
        if self._when == "half-way":
            raise RuntimeError("the device was lost")
        batch = step.sampling()
        logits = torch.zeros(len(batch), 211)
        logits[[batch.sequences.index(culprit) for culprit in culprits]] = float("nan")
        Sampler()(logits, batch)
        raise AssertionError("the sampler took logits that are no numbers")


@given(
    parsers.re(
        r'the model fails (?P<when>[\w -]+) wherever "(?P<culprit>[\w-]+)" takes part, '
        r"from its (?P<nth>first|third) token on"
    ),
    target_fixture="fault",
)
def fails_wherever(server: Server, when: str, culprit: str, nth: str) -> Fault:
    tokens = {"first": 0, "third": 2}[nth]

    def culprits(step: StepInput) -> list[SequenceSpec]:
        batch = step.sampling()
        rows = zip(batch.sequences, batch.num_outputs, strict=True)
        return [sequence for sequence, count in rows if sequence.request_id == culprit and count >= tokens]

    return Fault(server, when, culprits)


@given(parsers.re(r"the model fails (?P<when>half-way) in every pass"), target_fixture="fault")
def fails_always(server: Server, when: str) -> Fault:
    return Fault(server, when, lambda step: list(step.sequences))


@when(parsers.re(r"the model fails in its next pass, (?P<when>half-way)"), target_fixture="fault")
def fails_once(server: Server, when: str) -> Fault:
    left = [True]
    return Fault(server, when, lambda step: [step.sequences[0]] if left and left.pop() else [])


@when("the fault is over")
def fault_is_over(fault: Fault) -> None:
    fault.end()


@then(parsers.parse('"{name}" failed after {count:d} tokens of output'), target_fixture="culprit")
def failed_with(server: Server, model: Checkpoint, name: str, count: int) -> str:
    sequence = server.sequences[name]
    assert sequence.finish_reason is FinishReason.FAILED
    assert sequence.error
    outputs = server.outputs[name]
    tokens = [output.token_id for output in outputs if output.token_id is not None]
    assert (len(outputs), len(tokens), outputs[-1].token_id) == (count + 1, count, None)
    assert not tokens or tokens == model.greedy(sequence.request.prompt_token_ids, tokens)
    assert outputs[-1].error == sequence.error
    return name


@then("every other answer is what transformers generates, token for token")
def others_equal_reference(server: Server, model: Checkpoint, culprit: str) -> None:
    for name, sequence in server.sequences.items():
        if name != culprit:
            request = sequence.request
            assert sequence.finish_reason is FinishReason.LENGTH
            assert sequence.num_output_tokens == request.sampling.max_tokens
            assert sequence.output_token_ids == model.greedy(request.prompt_token_ids, sequence.output_token_ids)


@then("every request failed")
def every_request_failed(server: Server) -> None:
    assert {s.finish_reason for s in server.sequences.values()} == {FinishReason.FAILED}


@then("one pass failed")
def one_pass_failed(server: Server) -> None:
    assert sum(record.failed_passes for record in server.records) == 1


@then("some passes failed, some requests failed and the others completed")
def faults_in_summary(commands: list[Command]) -> None:
    metrics = commands[-1].summary["metrics"]
    assert metrics["engine/failed_passes"] > metrics["requests/failed"] > 0
    assert metrics["requests/completed"] > 0
    assert metrics["requests/completed"] + metrics["requests/failed"] == 12
    errors = [row["error"] for row in commands[-1].rows("requests.parquet") if row["finish_reason"] == "failed"]
    assert all("InjectedFault" in error for error in errors)


@then("no block leaked")
def no_block_leaked(commands: list[Command]) -> None:
    assert commands[-1].summary["metrics"]["kv/leaked_blocks"] == 0
