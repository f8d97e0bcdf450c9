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
from numpy.typing import NDArray

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

if TYPE_CHECKING:
    from kvlab.engine.sampler import Sampler

_MOST_DEVICES = 64
_GOLDEN, _MIX = np.uint64(0x9E3779B97F4A7C15), (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class SimulatedExecutor(Executor):
    """Draws a token for each sequence from its name and the token's position, never an end-of-sequence token, and
    takes the time that `timing` says.
    """

    def __init__(self, timing: RooflineTiming) -> None:
        self._timing = timing
        self._tokens = np.setdiff1d(np.arange(timing.model.vocab_size), timing.model.eos_token_ids)
        self._seeds: dict[SequenceSpec, int] = {}

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        rows = step.sampled
        seeds = np.fromiter((self._seed(step.sequences[row]) for row in rows.tolist()), np.uint64, len(rows))
        drawn = _hash(seeds, step.num_outputs[rows])
        taken = self._timing.step(step.num_tokens, np.asarray(view.lengths, dtype=np.int64), len(rows))
        tokens: list[int] = self._tokens[drawn % np.uint64(len(self._tokens))].tolist()
        return StepResult(tokens, elapsed_s=taken.total)

    def _seed(self, sequence: SequenceSpec) -> int:
        seed = self._seeds.get(sequence)
        if seed is None:
            seed = self._seeds[sequence] = crc32(f"{sequence.request_id} {sequence.index}".encode())
        return seed


def _hash(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea, Flood, 2014) of each pair."""
    x = (seeds << np.uint64(32)) + positions.astype(np.uint64) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


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
