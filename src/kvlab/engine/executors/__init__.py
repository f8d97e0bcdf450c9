"""Executors by name: what computes the tokens of a step, and on which clock. One file per kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvlab.registry import Registry

if TYPE_CHECKING:
    from kvlab.engine.build import EnginePlan
    from kvlab.engine.clock import Clock
    from kvlab.engine.sampler import Sampler
    from kvlab.engine.step import Executor
    from kvlab.kv.storage import KVStorage


class Execution(NamedTuple):
    """What an engine runs on."""

    executor: Executor
    clock: Clock
    storage: KVStorage | None  # tensors of the pool; None: the executor needs none


class ExecutorBuilder(Protocol):
    """Builds an executor of one kind."""

    def __call__(self, plan: EnginePlan, *, sampler: Sampler | None = None) -> Execution:
        """What the plan's engine runs on; `sampler` replaces the kind's own.

        Raises WeightsError or CapacityError.
        """


EXECUTORS: Registry[ExecutorBuilder] = Registry("executor.kind", __name__)
