"""One forward pass for each sequence of a step: what people write first, to compare a flat batch with."""

from kvlab.core import TokenLogprobs
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.kv.view import CacheView


class PerSequenceExecutor(Executor):
    """Runs another executor once for each sequence, in the order of the flat batch.

    Scheduling, memory and tokens are those of one pass for all: the sequences share the pool, each pass sees the
    block table of its own. What is lost is what they could share, the weights that a pass reads above all.

    The order matters: a sequence may share blocks that another one, ahead of it, fills in the same step.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        """See Executor. On a modelled device the passes take the sum of their times."""
        passes = [self._executor.execute(step.alone(row), view.alone(row)) for row in range(len(step.sequences))]
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for result in passes:
            token_ids += result.token_ids
            logprobs += result.logprobs or [None] * len(result.token_ids)
        times = [result.elapsed_s for result in passes if result.elapsed_s is not None]
        scored = [entry for result in passes for entry in result.prompt_logprobs]
        return StepResult(token_ids, logprobs if any(logprobs) else None, sum(times) if times else None, scored)
