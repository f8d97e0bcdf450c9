"""Where a step's time goes: wrappers around operations, attention and sampler time each call.

A run without `debug=profile` has no wrapper.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch

from kvlab.attention.base import AttentionBackend
from kvlab.core import StepRecord
from kvlab.engine.build import EnginePlan, build_engine
from kvlab.engine.clock import Clock
from kvlab.engine.engine import Engine
from kvlab.engine.executors.torch import GreedySampler
from kvlab.engine.sampler import Sampler
from kvlab.engine.step import Executor
from kvlab.kv.journal import BlockJournal
from kvlab.models.ops.base import LayerPart, Linear, Ops, Stack, TopK
from kvlab.models.ops.cpu_layers import NativeStack

P = ParamSpec("P")
T = TypeVar("T")


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
    """Collects spans, on the clock of the engine that it builds. On a GPU each span ends when the device has
    finished its work, so that a part's time is its own and the run takes longer.
    """

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.perf_counter
        self.steps: list[ProfiledStep] = []
        self._spans: list[tuple[Part, float, float]] = []  # of the current step, made into Spans at its end

    def build(
        self,
        plan: EnginePlan,
        *,
        journal: BlockJournal | None = None,
        wrap: Callable[[Executor], Executor] | None = None,
    ) -> Engine:
        """The plan's engine, its parts timed."""
        ops, attention = cast(Ops, TimedOps(plan.ops, self)), timed_attention(plan.attention, self)
        sampler = cast(GreedySampler, _TimedCall(Sampler(plan.ops), self, Part.SAMPLING, take_top1=Part.SAMPLING))
        timed = replace(plan, ops=ops, attention=attention)
        engine = build_engine(timed, journal=journal, sampler=sampler, wrap=wrap)
        self.now = partial(_now_on_gpu, engine.clock) if plan.device == "cuda" else engine.clock.now
        return engine

    def measure(self, part: Part, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function, as a span of `part`."""
        start = self.now()
        result = function(*args, **kwargs)
        self._spans.append((part, start, self.now()))
        return result

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


class Timed:
    """Another object with its public attributes as they are, but for methods that are timed or its own."""

    def __init__(self, inner: Any, profiler: Profiler, **parts: Part) -> None:
        self.inner, self.profiler = inner, profiler
        for name in dir(inner):
            if not name.startswith("_") and not hasattr(type(self), name):
                value = getattr(inner, name)
                setattr(self, name, partial(profiler.measure, parts[name], value) if name in parts else value)


class _TimedCall(Timed):
    """An object that is called, and timed."""

    def __init__(self, inner: Any, profiler: Profiler, part: Part, **parts: Part) -> None:
        super().__init__(inner, profiler, **parts)
        self._part = part

    def __call__(self, *args: Any) -> Any:
        return self.profiler.measure(self._part, self.inner, *args)


class TimedOps(Timed):
    """Other ops, timed. See Ops. `topk` is not: the sampler is timed as a whole."""

    def __init__(self, ops: Ops, profiler: Profiler) -> None:
        elementwise = ("norm", "add_norm", "gated", "angles", "rotate_and_store")
        super().__init__(ops, profiler, **dict.fromkeys(elementwise, Part.ELEMENTWISE))

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, lookup: bool = False) -> Linear:
        """See Ops."""
        return cast(Linear, _TimedCall(self.inner.linear(weight, bias, lookup=lookup), self.profiler, Part.LINEAR))

    def stack(self, layers: Sequence[Sequence[LayerPart]], attention: AttentionBackend) -> Stack | None:
        """See Ops. A native stack reports the times of its operations itself."""
        stack = self.inner.stack([[_untimed(part) for part in layer] for layer in layers], _inner(attention))
        if not isinstance(stack, NativeStack):
            return None
        stack.on_times = self.profiler.add_layers
        return stack

    def linear_top1(self, linear: Linear, x: torch.Tensor) -> TopK:
        """See Ops. Whether the product is written or not, it counts as one."""
        return cast(TopK, self.profiler.measure(Part.LINEAR, self.inner.linear_top1, _inner(linear), x))


def timed_attention(backend: AttentionBackend, profiler: Profiler) -> AttentionBackend:
    """An attention backend, timed."""
    return cast(AttentionBackend, Timed(backend, profiler, forward=Part.ATTENTION))


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, Timed) else value


def _untimed(part: Any) -> Any:
    """A part of a layer with the products that its own are wrapped around."""
    values = {field.name: getattr(part, field.name) for field in fields(part)} if is_dataclass(part) else {}
    own = {name: value.inner for name, value in values.items() if isinstance(value, Timed)}
    return replace(part, **own) if own else part


def _now_on_gpu(clock: Clock) -> float:
    torch.cuda.synchronize()
    return clock.now()
