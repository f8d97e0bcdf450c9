"""A running server as the steps see it: a real engine, the blocks its requests hold, the log of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from features.steps.checkpoints import Checkpoint
from features.steps.support import Memory, MemorySize
from kvlab.config import SchedulerConfig
from kvlab.core import Request, SamplingParams, Sequence, StepOutput, StepRecord
from kvlab.engine.clock import LogicalClock, WallClock
from kvlab.engine.core import EngineCore
from kvlab.engine.scheduler import build_scheduler
from kvlab.engine.step import Executor
from kvlab.hashed_prompt import TokenIds
from tests.support.executors import RecordingExecutor

_MANY = 2000  # steps; no scenario takes as many


@dataclass
class Server:
    """An engine and what it did. The pool is audited after each step."""

    engine: EngineCore
    memory: Memory
    executor: Executor
    passes: list[list[tuple[str, int]]]  # who took part in each forward pass, with how many tokens
    sequences: dict[str, Sequence] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)
    outputs: dict[str, list[StepOutput]] = field(default_factory=dict)  # what each request's reader was given
    held: dict[str, list[int]] = field(default_factory=dict)  # blocks of each request ahead of the latest step
    history: list[dict[str, list[int]]] = field(default_factory=list)  # blocks of each request after each step

    @classmethod
    def start(
        cls,
        model: Checkpoint,
        size: MemorySize,
        scheduling: SchedulerConfig,
        *,
        sharing: bool = False,
        step_s: float | None = None,
    ) -> Server:
        """A server of this model with this much memory for K and V. With `step_s` each step takes that many seconds
        of a logical clock.
        """
        longest = size.count * size.tokens if size.paged else size.tokens
        pool = size.build(model.config.kv_spec("float32"), longest, sharing=sharing)
        scheduler = build_scheduler(scheduling)
        executor = RecordingExecutor(model.decoder, step_s)
        clock = WallClock() if step_s is None else LogicalClock()
        return cls(EngineCore(pool, scheduler, executor, clock), Memory(pool), executor, executor.passes)

    def submit(
        self,
        name: str,
        prompt: TokenIds,
        max_tokens: int,
        reader: Callable[[StepOutput], None] | None = None,
        *,
        salt: str | None = None,
        sampling: SamplingParams | None = None,
        priority: int = 0,
        arrival_s: float = 0.0,
        deadline_s: float | None = None,
    ) -> None:
        """Queue a request, greedy unless `sampling` says otherwise; `reader` is called with each output, at the
        moment it is handed out.
        """
        outputs: list[StepOutput] = []

        def sink(output: StepOutput) -> None:
            outputs.append(output)
            if reader is not None:
                reader(output)

        request = Request(
            name,
            prompt,
            sampling or SamplingParams(max_tokens),
            arrival_s,
            salt,
            priority=priority,
            deadline_s=deadline_s,
        )
        self.sequences[name] = self.engine.add_request(request, sink)
        self.outputs[name] = outputs

    def blocks(self, name: str) -> list[int]:
        """The blocks a request holds, none if it has no slot."""
        slot = self.sequences[name].slot
        return [] if slot is None else self.memory.pool.tables.blocks(slot)

    def step(self) -> StepRecord | None:
        """One step of the engine."""
        self.held = {name: self.blocks(name) for name in self.sequences}
        record = self.engine.step()
        if record is not None:
            self.records.append(record)
            self.history.append({name: self.blocks(name) for name in self.sequences})
        self.memory.audit()
        return record

    def step_until(self, reached: Callable[[], bool]) -> None:
        """Step until `reached`; fails where that never comes."""
        for _ in range(_MANY):
            if reached():
                return
            self.step()
        raise AssertionError(f"not reached in {_MANY} steps")

    def run(self) -> None:
        """Step until there is no work."""
        self.step_until(lambda: not self.engine.has_work())
