"""Executors by name: what computes the tokens of a step, and on which clock. One file per kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from kvlab.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlab.config import EngineConfig
    from kvlab.engine.clock import Clock
    from kvlab.engine.plan import EnginePlan
    from kvlab.engine.sampler import Sampler
    from kvlab.engine.step import Executor
    from kvlab.kv.storage import KVStorage
    from kvlab.kv.tiers.settings import Links


class Execution(NamedTuple):
    """What an engine runs on."""

    executor: Executor
    clock: Clock
    storage: KVStorage | None  # tensors of the pool; None: the executor needs none
    links: Links | None = None  # of a simulated device to the pool's tiers
    weights: str = ""  # a digest of the model's, where the pool has a tier on disk
    close: Callable[[], None] | None = None  # ends the processes that compute with this one


class ExecutorKind(ABC):
    """A kind of executors: what it needs, and how it is made."""

    @staticmethod
    @abstractmethod
    def plan(config: EngineConfig, *, random_sampling: bool = True) -> EnginePlan:
        """See `kvlab.engine.build.plan_engine`."""

    @staticmethod
    @abstractmethod
    def build(plan: EnginePlan, *, sampler: Sampler | None = None) -> Execution:
        """What the plan's engine runs on; `sampler` replaces the kind's own.

        Raises WeightsError or CapacityError.
        """


EXECUTORS: Registry[type[ExecutorKind]] = Registry("executor.kind", __name__)
