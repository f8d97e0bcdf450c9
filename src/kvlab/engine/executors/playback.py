"""A recorded run in the place of a device: its tokens, when they were there."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvlab.config import EngineConfig
from kvlab.core import UNKNOWN_TOKEN
from kvlab.engine.clock import LogicalClock
from kvlab.engine.executors import EXECUTORS, Execution, ExecutorKind
from kvlab.engine.plan import EnginePlan
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import ConfigError, RecordError
from kvlab.kv.view import CacheView
from kvlab.models.families import decoder_config
from kvlab.planning.cache import kv_spec, planned_pool
from kvlab.planning.devices import settings_of_devices
from kvlab.planning.plan import plan_memory
from kvlab.simulation.recording import Recording
from kvlab.simulation.recording_files import KEY, read_recording

if TYPE_CHECKING:
    from kvlab.engine.sampler import Sampler


class PlaybackClock(LogicalClock):
    """Starts when the first step of the recording did."""

    def __init__(self, recording: Recording) -> None:
        self._first_s: float = recording.steps[0]["start_s"]
        super().__init__()
        self.restart()

    def restart(self) -> None:
        self._now = self._first_s


class PlaybackExecutor(Executor):
    """Answers each pass with the recorded tokens, and lets the clock be where it was when they were there; after a
    pass without any, where it was at the end of the step.

    A token that was never recorded fails the pass: the engine has decided otherwise, which shows in the step.
    """

    def __init__(self, recording: Recording, clock: LogicalClock) -> None:
        self._recording, self._clock = recording, clock

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        recording, tokens = self._recording, list[int]()
        when = recording.ends_s.get(self._clock.now(), 0.0)
        rows, last = step.sampling(), None
        for spec, position in zip(rows.sequences, rows.num_outputs.tolist(), strict=True):
            outputs = recording.outputs.get((spec.request_id, spec.index))
            is_first, last = spec is not last, spec  # of its rows; behind it come those of proposed tokens
            if outputs is not None and position < len(outputs.token_ids):
                tokens.append(outputs.token_ids[position])
                when = outputs.times_s[position] if is_first else when
            elif is_first:
                raise RecordError(f"{recording.source} has no token {position} of request {spec.request_id!r}")
            else:  # its output ends before
                tokens.append(UNKNOWN_TOKEN)
        self._clock.wait_until(when)
        return StepResult(tokens)


@EXECUTORS.register("playback")
class PlaybackExecution(ExecutorKind):
    """On the record of a run, in `executor.recording`: with the same settings an engine decides the same."""

    @staticmethod
    def plan(config: EngineConfig, *, random_sampling: bool = True) -> EnginePlan:
        """Raises ConfigError for what is no finished run, and RecordError for files that are spoiled."""
        path, kv = config.executor.recording, config.kv
        if not path:
            raise ConfigError(KEY, path, "executor=playback plays back a recorded run; name its directory")
        if config.hardware is not None:
            text = "is no part of a playback, whose times are recorded; leave it out"
            raise ConfigError("hardware", config.hardware.name, text)
        if kv.offload or kv.offload_disk:
            text = "when blocks came back is not recorded, so that such a run cannot be played back; leave it null"
            raise ConfigError("kv.offload", kv.offload, text)
        recording, model = read_recording(path), decoder_config(config.model, simulated=True)
        spec = kv_spec(config, model)
        is_sized = kv.num_blocks is not None or kv.memory is not None
        sized = config if is_sized else replace(config, kv=replace(kv, num_blocks=recording.num_blocks))
        pool = planned_pool(sized, spec)
        if not is_sized:  # where layers have windows, blocks are those of groups
            pool = replace(pool, num_blocks=recording.num_blocks)
        planned = plan_memory(model, spec, settings_of_devices(config, model))
        weights, working = planned.weights, planned.working
        return EnginePlan(config, "recorded", model, weights, working, pool, None, None, None, recording)

    @staticmethod
    def build(plan: EnginePlan, *, sampler: Sampler | None = None) -> Execution:
        if (recording := plan.recording) is None:
            raise ConfigError("executor.kind", "playback", "the plan has no recording; plan it as playback")
        clock = PlaybackClock(recording)
        return Execution(PlaybackExecutor(recording, clock), clock, None)
