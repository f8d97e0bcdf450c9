"""Where a step's time goes: what a model asks of others is timed by wrappers around them.

A run without `debug=profile` has none of this in its way.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import torch

from kvlab.attention.base import AttentionBackend, AttentionSpec, Support, layout_of
from kvlab.core import StepRecord
from kvlab.engine.build import EnginePlan, build_engine
from kvlab.engine.clock import Clock
from kvlab.engine.engine import Engine
from kvlab.engine.executor import GreedySampler
from kvlab.engine.sampler import Sampler
from kvlab.engine.step import Executor, SamplingBatch, StepResult
from kvlab.kv.journal import BlockJournal
from kvlab.kv.view import CacheView
from kvlab.models.ops.base import Angles, LayerPart, Linear, Norm, Ops, Stack, TopK
from kvlab.models.ops.cpu_layers import NativeStack
from kvlab.models.rope import RotaryEmbedding


class Part(StrEnum):
    """A share of a step."""

    ATTENTION = "attention"
    LINEAR = "linear"  # matrix products, the output layer's included
    ELEMENTWISE = "elementwise"  # norms, gates, rotary angles, K and V stored
    SAMPLING = "sampling"
    SCHEDULING = "scheduling"  # ahead of the model: retire, admit, plan, reserve, view
    OTHER = "other"  # inputs and embeddings ahead of the layers, what Python does in between, the step's accounts


#: Operations of native layers that are not elementwise.
_PART_OF = {"attention": Part.ATTENTION, **dict.fromkeys(("qkv", "out", "gate_up", "down"), Part.LINEAR)}


class Span(NamedTuple):
    """A part's work without interruption. Seconds on the engine's clock."""

    part: Part
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """A step and the spans within it."""

    record: StepRecord
    spans: tuple[Span, ...]

    def seconds(self) -> dict[Part, float]:
        """What each part took; together the whole step."""
        taken = dict.fromkeys(Part, 0.0)
        for part, start, end in self.spans:
            taken[part] += end - start
        taken[Part.SCHEDULING] = self.record.schedule_ms / 1000
        taken[Part.OTHER] = max(0.0, self.record.end_s - self.record.start_s - sum(taken.values()))
        return taken


class Profiler:
    """Collects spans, on the clock of the engine that it builds. On a GPU each of them waits until the device has
    done what was asked of it, so that a part's time is its own and the run takes longer.
    """

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.perf_counter
        self.steps: list[ProfiledStep] = []
        self._spans: list[tuple[Part, float, float]] = []  # of the step that runs, made into Spans behind it

    def build(
        self,
        plan: EnginePlan,
        *,
        journal: BlockJournal | None = None,
        wrap: Callable[[Executor], Executor] | None = None,
    ) -> Engine:
        """The plan's engine, its parts timed."""
        ops, attention = ProfilingOps(plan.ops, self), ProfilingAttention(plan.attention, self)
        sampler = ProfilingSampler(Sampler(plan.ops), self)
        timed = replace(plan, ops=ops, attention=attention)
        engine = build_engine(timed, journal=journal, sampler=sampler, wrap=wrap)
        self.now = partial(_now_on_gpu, engine.clock) if plan.device == "cuda" else engine.clock.now
        return engine

    def add(self, part: Part, start: float) -> None:
        """A span of `part` from `start` until now."""
        self._spans.append((part, start, self.now()))

    def add_layers(self, operations: Sequence[str], times: list[float]) -> None:
        """The spans of layers that ran without Python, from when each operation began; they end now."""
        late = self.now() - times[-1]  # their clock may count from another moment
        for operation, (start, end) in zip(operations, itertools.pairwise(times), strict=True):
            self._spans.append((_PART_OF.get(operation, Part.ELEMENTWISE), start + late, end + late))

    def end_step(self, record: StepRecord | None) -> None:
        """Give a step the spans since the last."""
        spans, self._spans = self._spans, []
        if record is not None and record.batch_seqs:
            self.steps.append(ProfiledStep(record, tuple(Span(*span) for span in spans)))

    def metrics(self) -> dict[str, float]:
        """`profile/<part>_ms_mean`, per step, and `profile/<part>_share`, in percent of all steps' time."""
        totals = dict.fromkeys(Part, 0.0)
        for step in self.steps:
            for part, seconds in step.seconds().items():
                totals[part] += seconds
        whole = sum(totals.values())
        if not whole:
            return {}
        means = {f"profile/{part}_ms_mean": 1000 * total / len(self.steps) for part, total in totals.items()}
        return means | {f"profile/{part}_share": 100 * total / whole for part, total in totals.items()}


class ProfilingOps:
    """Other ops, timed. See Ops."""

    def __init__(self, ops: Ops, profiler: Profiler) -> None:
        self.name = ops.name
        self.tied_copies = ops.tied_copies
        self._ops = ops
        self._profiler = profiler

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, lookup: bool = False) -> Linear:
        """See Ops."""
        return _ProfilingLinear(self._ops.linear(weight, bias, lookup=lookup), self._profiler)

    def norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See Ops."""
        start = self._profiler.now()
        out = self._ops.norm(x, norm)
        self._profiler.add(Part.ELEMENTWISE, start)
        return out

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """See Ops."""
        start = self._profiler.now()
        out = self._ops.add_norm(x, residual, norm)
        self._profiler.add(Part.ELEMENTWISE, start)
        return out

    def gated(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """See Ops."""
        start = self._profiler.now()
        out = self._ops.gated(gate_up, activation)
        self._profiler.add(Part.ELEMENTWISE, start)
        return out

    def angles(self, rotary: RotaryEmbedding, positions: torch.Tensor) -> Angles:
        """See Ops."""
        start = self._profiler.now()
        out = self._ops.angles(rotary, positions)
        self._profiler.add(Part.ELEMENTWISE, start)
        return out

    def rotate_and_store(
        self, qkv: torch.Tensor, norms: tuple[Norm, Norm] | None, angles: Angles, view: CacheView, layer: int
    ) -> torch.Tensor:
        """See Ops."""
        start = self._profiler.now()
        out = self._ops.rotate_and_store(qkv, norms, angles, view, layer)
        self._profiler.add(Part.ELEMENTWISE, start)
        return out

    def stack(self, layers: Sequence[Sequence[LayerPart]], attention: AttentionBackend) -> Stack | None:
        """See Ops. A native stack reports the times of its operations itself."""
        own = [[_untimed(part) for part in layer] for layer in layers]
        stack = self._ops.stack(own, attention.timed if isinstance(attention, ProfilingAttention) else attention)
        if not isinstance(stack, NativeStack):
            return None
        stack.on_times = self._profiler.add_layers
        return stack

    def linear_top1(self, linear: Linear, x: torch.Tensor) -> TopK:
        """See Ops. Whether the product is written or not, it counts as one."""
        start = self._profiler.now()
        out = self._ops.linear_top1(linear.timed if isinstance(linear, _ProfilingLinear) else linear, x)
        self._profiler.add(Part.LINEAR, start)
        return out

    def topk(self, x: torch.Tensor, count: int = 1) -> TopK:
        """See LogitsOps. The sampler is timed as a whole."""
        return self._ops.topk(x, count)


def _untimed(part: Any) -> Any:
    """A part of a layer with the products that its own are wrapped around."""
    values = {field.name: getattr(part, field.name) for field in fields(part)} if is_dataclass(part) else {}
    own = {name: value.timed for name, value in values.items() if isinstance(value, _ProfilingLinear)}
    return replace(part, **own) if own else part


class _ProfilingLinear:
    """A product, timed. See Linear."""

    def __init__(self, linear: Linear, profiler: Profiler) -> None:
        self.timed = linear
        self._profiler = profiler
        self.rows = linear.rows  # a lookup, and no product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        start = self._profiler.now()
        out = self.timed(x)
        self._profiler.add(Part.LINEAR, start)
        return out


class ProfilingAttention:
    """An attention backend, timed. See AttentionBackend."""

    def __init__(self, backend: AttentionBackend, profiler: Profiler) -> None:
        self.name = backend.name
        self.layout = layout_of(backend)
        self.timed = backend
        self._profiler = profiler

    def supports(self, spec: AttentionSpec) -> Support:
        """See AttentionBackend."""
        return self.timed.supports(spec)

    def forward(self, q: torch.Tensor, view: CacheView, layer: int, spec: AttentionSpec) -> torch.Tensor:
        """See AttentionBackend."""
        start = self._profiler.now()
        out = self.timed.forward(q, view, layer, spec)
        self._profiler.add(Part.ATTENTION, start)
        return out


class ProfilingSampler:
    """A sampler, timed. See GreedySampler."""

    def __init__(self, sampler: GreedySampler, profiler: Profiler) -> None:
        self.is_greedy = sampler.is_greedy
        self._sampler = sampler
        self._profiler = profiler

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """See SamplerProtocol."""
        start = self._profiler.now()
        result = self._sampler(logits, batch)
        self._profiler.add(Part.SAMPLING, start)
        return result

    def take_top1(self, top1: TopK, batch: SamplingBatch) -> StepResult:
        """See GreedySampler."""
        start = self._profiler.now()
        result = self._sampler.take_top1(top1, batch)
        self._profiler.add(Part.SAMPLING, start)
        return result


def _now_on_gpu(clock: Clock) -> float:
    torch.cuda.synchronize()
    return clock.now()
