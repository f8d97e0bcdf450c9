"""The memory of an engine as one plan, which runs, simulated runs, `kvlab capacity` and `kvlab tune` share."""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.kv.spec import KVSpec
from kvlab.models.config import DecoderConfig
from kvlab.models.sparse import SparseConfig
from kvlab.planning.memory import EngineSettings, WeightBytes, WorkingMemory, weight_bytes, working_memory
from kvlab.planning.sparse import sparse_weight_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What takes an engine's memory, and what decides it."""

    model: DecoderConfig
    spec: KVSpec
    settings: EngineSettings
    weights: WeightBytes
    working: WorkingMemory
    memory: int | None  # bytes of the device or devices; None: not known, or the cache's size was given instead

    def left(self, memory: int) -> int:
        """Bytes of `memory` for the cache. Negative where weights and steps alone need more."""
        return memory - self.weights.total - self.working.peak

    def needed(self, block: int) -> int:
        """Bytes that loading the weights, and then steps with a cache of one `block` of so many bytes, need."""
        return self.weights.total + max(self.working.peak + block, self.working.loading)


def plan_memory(
    model: DecoderConfig, spec: KVSpec, settings: EngineSettings, memory: int | None = None
) -> MemoryPlan:
    """The plan of a model whose cache stores `spec` for a token."""
    if isinstance(model, SparseConfig):
        weights = sparse_weight_bytes(model, settings)
    else:
        weights = weight_bytes(model, settings)
    working = working_memory(model, spec, settings)
    return MemoryPlan(model, spec, settings, weights, working, memory)
