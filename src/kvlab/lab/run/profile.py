"""Where a step's time goes: with `debug=profile` each call of operations, attention and sampler is timed."""

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from kvlab.attention.base import AttentionBackend
from kvlab.core import StepRecord
from kvlab.engine.build import build_engine
from kvlab.engine.clock import Clock
from kvlab.engine.core import EngineCore
from kvlab.engine.plan import EnginePlan
from kvlab.models.ops.base import LayerPart, Ops, Stack

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
    """Collects spans, on the clock of the engine that it builds. On a GPU each waits for the device to finish."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.now: Callable[[], float] = time.perf_counter
        self.steps: list[ProfiledStep] = []
        self._spans: list[tuple[Part, float, float]] = []  # of the current step, made into Spans at its end
        self._measuring = False

    def build(self, plan: EnginePlan, **options: Any) -> EngineCore:
        """The plan's engine, its parts timed; `options` are those of `build_engine`."""
        from kvlab.engine.sampler import Sampler  # this late, since it imports torch

        kernels = plan.computed_by
        attention = timed(kernels.attention, self, forward=Part.ATTENTION)
        sampler = timed(Sampler(kernels.ops), self, __call__=Part.SAMPLING, take_top1=Part.SAMPLING)
        timed_kernels = kernels._replace(ops=timed_ops(kernels.ops, self), attention=attention)
        engine = build_engine(replace(plan, kernels=timed_kernels), sampler=sampler, **options)
        self.now = partial(_now_on_gpu, engine.clock) if plan.device == "cuda" else engine.clock.now
        return engine

    def measure(self, part: Part, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function, as a span of `part`. A call within another belongs to the outer one's part."""
        if self._measuring:
            return function(*args, **kwargs)
        self._measuring, start = True, self.now()
        try:
            result = function(*args, **kwargs)
        finally:
            self._measuring = False
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
        if self.enabled and record is not None and record.batch_seqs:
            self.steps.append(ProfiledStep(record, tuple(Span(*span) for span in spans)))

    def metrics(self) -> dict[str, float]:
        """`profile/<part>_ms_mean`, per step, and `profile/<part>_share`, in percent of all steps' time."""
        steps = [step.seconds() for step in self.steps]
        totals = {part: sum(seconds[part] for seconds in steps) for part in Part}
        whole = sum(totals.values())
        if not whole:
            return {}
        means = {f"profile/{part}_ms_mean": 1000 * total / len(steps) for part, total in totals.items()}
        return means | {f"profile/{part}_share": 100 * total / whole for part, total in totals.items()}


def timed(inner: T, profiler: Profiler, **parts: Part) -> T:
    """A copy of an object, of a subclass of its class, whose named methods are timed as parts."""
    kind: type = type(inner)

    def method(name: str, part: Part) -> Callable[..., Any]:
        function = getattr(kind, name)
        return lambda *args, **kwargs: profiler.measure(part, function, *args, **kwargs)

    clone: Any = copy.copy(inner)
    clone.__class__ = type(kind.__name__, (kind,), {name: method(name, part) for name, part in parts.items()})
    return cast(T, clone)


def timed_ops(ops: Ops, profiler: Profiler) -> Ops:
    """Ops, timed. Those of the sampler are not: it is timed as a whole."""
    from kvlab.models.ops.cpu_layers import NativeStack

    elementwise = dict.fromkeys(("norm", "add_norm", "gated", "angles", "rotate_and_store"), Part.ELEMENTWISE)
    clone: Any = timed(ops, profiler, linear_top1=Part.LINEAR, **elementwise)

    def stack(layers: Sequence[Sequence[LayerPart]], attention: AttentionBackend) -> Stack | None:
        stack = ops.stack(layers, attention)
        if not isinstance(stack, NativeStack):
            return None
        stack.on_times = profiler.add_layers  # it reports the times of its operations itself
        return stack

    clone.linear = lambda *args, **kwargs: timed(
        ops.linear(*args, **kwargs), profiler, __call__=Part.LINEAR, logits=Part.LINEAR
    )
    clone.stack = stack
    return cast(Ops, clone)


def _now_on_gpu(clock: Clock) -> float:
    import torch

    torch.cuda.synchronize()
    return clock.now()
