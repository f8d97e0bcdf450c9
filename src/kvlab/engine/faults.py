"""An executor that fails on purpose, to test how the engine isolates failures."""

import random

from kvlab.config import FaultsConfig
from kvlab.core import SequenceSpec
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.kv.view import CacheView


class InjectedFault(RuntimeError):
    """A fault that was asked for."""


class FaultyExecutor(Executor):
    """Another executor, with faults of the configured kind put in; the same seed gives the same faults.

    `forward` strikes before anything is computed, `sampler` when K and V are written and the tokens are lost. A
    poisoned request (`sequence`) fails every pass from a token of its output on that is its own; which requests are
    poisoned depends on their ids alone.
    """

    def __init__(self, executor: Executor, config: FaultsConfig) -> None:
        self._executor = executor
        self._config = config
        self._draws = random.Random(config.seed)

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        if self._config.kind in ("sequence", "any"):
            for sequence, num_outputs in zip(step.sequences, step.num_outputs.tolist(), strict=True):
                since = self.poisoned_from(sequence)
                if since is not None and num_outputs >= since:
                    raise InjectedFault(f"sequence {sequence.request_id!r} is poisoned")
        if self._strikes("forward"):
            raise InjectedFault("the forward pass failed")
        result = self._executor.execute(step, view)
        if self._strikes("sampler"):
            raise InjectedFault("the sampler failed")
        return result

    def poisoned_from(self, sequence: SequenceSpec) -> int | None:
        """The number of output tokens from which on a request fails; None: never."""
        if self._config.kind not in ("sequence", "any"):
            return None
        draws = random.Random(f"{self._config.seed} {sequence.request_id}")
        most = sequence.expected_tokens or sequence.sampling.max_tokens
        return draws.randrange(most) if draws.random() < self._config.rate else None

    def _strikes(self, kind: str) -> bool:
        return self._config.kind in (kind, "any") and self._draws.random() < self._config.rate
