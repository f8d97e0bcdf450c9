"""A device that is not here: tokens are drawn, and a step takes the time that the device would take.

Scheduler, block tables, prefix index and eviction are the engine's own, on a clock that moves only by what steps
take: two runs are the same to the byte, on any machine and under any load.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count, takewhile
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from kvlab.config import EngineConfig, HardwareConfig, format_bytes, parse_bytes
from kvlab.core import SequenceSpec
from kvlab.engine.build import EnginePlan, attention_elsewhere, kv_spec, memory_settings
from kvlab.engine.clock import LogicalClock
from kvlab.engine.executors import EXECUTORS, Execution, ExecutorKind
from kvlab.engine.memory import WeightBytes, WorkingMemory, weight_bytes, working_memory
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import CapacityError, ConfigError
from kvlab.kv.sizing import size_pool
from kvlab.kv.view import CacheView
from kvlab.models.families import decoder_config
from kvlab.simulation.roofline import RooflineTiming
from kvlab.splitmix import STEP, mix

if TYPE_CHECKING:
    from kvlab.engine.sampler import Sampler

_MOST_DEVICES = 64


class SimulatedExecutor(Executor):
    """Draws a token for each sequence from its name and the token's position, never an end-of-sequence token, and
    takes the time that `timing` says.
    """

    def __init__(self, timing: RooflineTiming) -> None:
        self._timing = timing
        self._tokens = np.setdiff1d(np.arange(timing.model.vocab_size), timing.model.eos_token_ids)

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        rows = step.sampled
        seeds = np.fromiter((_seed(step.sequences[row]) for row in rows.tolist()), np.uint64, len(rows))
        drawn = mix((seeds << np.uint64(32)) + step.num_outputs[rows].astype(np.uint64) * STEP)
        taken = self._timing.step(step.num_tokens, np.asarray(view.lengths, dtype=np.int64), len(rows))
        tokens: list[int] = self._tokens[drawn % np.uint64(len(self._tokens))].tolist()
        return StepResult(tokens, elapsed_s=taken.total)


def _seed(sequence: SequenceSpec) -> int:
    return crc32(f"{sequence.request_id} {sequence.index}".encode())


@EXECUTORS.register("simulated")
class SimulatedExecution(ExecutorKind):
    """On hardware that is described by the configuration."""

    @staticmethod
    def plan(config: EngineConfig, *, random_sampling: bool = True) -> EnginePlan:
        """Raises ConfigError without hardware, and for a model that cannot be divided among the devices."""
        hardware, devices = config.hardware, config.executor.tensor_parallel
        if hardware is None:
            raise ConfigError("hardware", None, "executor=simulated needs a device, as hardware=h100_sxm")
        dtype = config.executor.dtype
        if dtype not in hardware.tflops:
            known = ", ".join(hardware.tflops) or "none"
            raise ConfigError("executor.dtype", dtype, f"hardware.tflops of {hardware.name} has {known}")
        model = decoder_config(config.model)
        if model.num_kv_heads % devices or model.num_heads % devices:
            text = f"{config.model.name} has {model.num_kv_heads} KV heads, which have to be a multiple of it"
            raise ConfigError("executor.tensor_parallel", devices, text)
        if devices > 1 and not hardware.link_gb_s:
            raise ConfigError("executor.tensor_parallel", devices, f"{hardware.name} has no hardware.link_gb_s")
        spec = kv_spec(config, model)
        attention = attention_elsewhere(config, model, "cuda")
        settings = memory_settings(config, "cuda", attention, native=False, random_sampling=random_sampling)
        weights, working = weight_bytes(model, settings), working_memory(model, spec, settings)
        memory = memory_of_devices(config, hardware, working)
        kv, left = config.kv, memory - weights.total - working.peak
        if kv.num_blocks is None and kv.memory is None:
            check_devices(config, hardware, weights, working, kv.block_size * spec.bytes_per_token)
            kv = replace(kv, memory=f"{left}B")
        pool = size_pool(
            kv, spec, max_batch_size=config.scheduler.max_batch_size, max_seq_len=config.model.max_seq_len
        )
        name = name_of_devices(config, hardware)
        return EnginePlan(config, name, model, weights, working, pool, None, memory=memory, timing="roofline")

    @staticmethod
    def build(plan: EnginePlan, *, sampler: Sampler | None = None) -> Execution:
        config = plan.config
        assert config.hardware is not None
        timing = RooflineTiming(
            plan.model,
            config.hardware,
            config.executor.tensor_parallel,
            config.executor.dtype,
            plan.weights.parameters / plan.weights.stored,
            plan.pool.bytes_per_token,
        )
        return Execution(SimulatedExecutor(timing), LogicalClock(), None)


def name_of_devices(config: EngineConfig, hardware: HardwareConfig) -> str:
    """In words, as 4 x h100_sxm."""
    devices = config.executor.tensor_parallel
    return hardware.name if devices == 1 else f"{devices} x {hardware.name}"


def memory_of_devices(
    config: EngineConfig, hardware: HardwareConfig, working: WorkingMemory, devices: int | None = None
) -> int:
    """Bytes on all devices together for weights, cache and steps, which need their working memory on each device:
    counted here is that of one.
    """
    devices = devices or config.executor.tensor_parallel
    each = int(parse_bytes(hardware.memory, key="hardware.memory") * config.executor.memory_utilization)
    return devices * each - (devices - 1) * working.peak


def check_devices(
    config: EngineConfig, hardware: HardwareConfig, weights: WeightBytes, working: WorkingMemory, block: int
) -> None:
    """Raise CapacityError, saying how many devices would do, unless a `block` fits beside the weights."""
    devices, needed = config.executor.tensor_parallel, weights.total + working.peak + block
    if memory_of_devices(config, hardware, working) >= needed:
        return
    counts = takewhile(lambda count: count <= _MOST_DEVICES, (devices << times for times in count(1)))
    enough = next((each for each in counts if memory_of_devices(config, hardware, working, each) >= needed), None)
    advice = f"executor.tensor_parallel={enough} would do" if enough else "take a smaller model"
    raise CapacityError(
        f"{config.model.name} needs {format_bytes(needed)} for weights, steps and one block, and {hardware.memory} "
        f"on each of {devices} {hardware.name} are {format_bytes(memory_of_devices(config, hardware, working))} at "
        f"executor.memory_utilization={config.executor.memory_utilization}, which is less; {advice}"
    )
