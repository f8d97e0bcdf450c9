"""The memory of an engine as one plan, which runs, simulated runs, `kvlab capacity` and `kvlab tune` share."""

from dataclasses import dataclass, fields, replace
from typing import TypeVar

from kvlab.kv.spec import KVSpec
from kvlab.models.config import DecoderConfig, part_of
from kvlab.models.sparse import SparseConfig
from kvlab.planning.memory import EngineSettings, WeightBytes, WorkingMemory, weight_bytes, working_memory
from kvlab.planning.sparse import sparse_weight_bytes

T = TypeVar("T", WeightBytes, WorkingMemory)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What takes an engine's memory, and what decides it."""

    model: DecoderConfig
    spec: KVSpec
    settings: EngineSettings
    weights: WeightBytes
    working: WorkingMemory
    memory: int | None  # bytes of the device or devices; None: not known, or the cache's size was given instead

    @property
    def taken(self) -> int:
        """Bytes of working memory that are taken from the memory. SGLang's share of it leaves steps theirs."""
        return self.working.peak if self.settings.startup.profiled else 0

    def left(self, memory: int) -> int:
        """Bytes of `memory` for the cache. Negative where weights and steps alone need more."""
        return memory - self.weights.total - self.taken

    def needed(self, block: int) -> int:
        """Bytes that loading the weights, and then steps with a cache of one `block` of so many bytes, need."""
        return self.weights.total + max(self.working.peak + block, self.working.loading)


def plan_memory(
    model: DecoderConfig, spec: KVSpec, settings: EngineSettings, memory: int | None = None
) -> MemoryPlan:
    """The plan of a model whose cache stores `spec` for a token: of all ranks together."""
    if isinstance(model, SparseConfig):
        weights, working = sparse_weight_bytes(model, settings), working_memory(model, spec, settings)
        return MemoryPlan(model, spec, settings, weights, working, memory)
    ranks = settings.ranks
    part = model if ranks == 1 else part_of(model, ranks)
    if spec.copies > 1:  # of heads among simulated devices, and of what computes them
        part = replace(part, num_kv_heads=spec.copies * part.num_kv_heads)
    own = replace(spec, num_kv_heads=spec.num_kv_heads // ranks)
    weights, working = weight_bytes(part, settings), working_memory(part, own, settings)
    if ranks > 1:
        # Each rank takes its part of a weight that it reads whole. Rank 0 samples, from the logits of all.
        whole = working_memory(model, spec, settings)
        logits = working_memory(part, own, replace(settings, random_sampling=False)).logits + whole.logits // ranks
        working = _times(replace(working, logits=logits, loading=working.loading + whole.loading), ranks)
        weights = _times(weights, ranks)
    return MemoryPlan(model, spec, settings, weights, working, memory)


def _times(figures: T, count: int) -> T:
    return replace(figures, **{field.name: count * getattr(figures, field.name) for field in fields(figures)})
