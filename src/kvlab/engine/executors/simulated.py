"""A simulated device: tokens are drawn, and a step takes the time that the device would take.

Scheduler, block tables, prefix index and eviction are the engine's own, on a clock that moves only by what steps
take: two runs are the same to the byte, on any machine and under any load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from kvlab.config import EngineConfig, FrameworkConfig, HardwareConfig, KVConfig
from kvlab.core import SequenceSpec
from kvlab.engine.clock import LogicalClock
from kvlab.engine.executors import EXECUTORS, Execution, ExecutorKind
from kvlab.engine.plan import EnginePlan
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import ConfigError, shown
from kvlab.kv.tiers.base import Link, SimulatedLink
from kvlab.kv.tiers.settings import Links
from kvlab.kv.view import CacheView
from kvlab.models.config import DecoderConfig, TransformersConfig
from kvlab.models.sparse import SparseConfig
from kvlab.models.sparse_reader import SPARSE
from kvlab.planning.cache import planned_pool
from kvlab.planning.devices import check_devices, name_of_devices, plan_on_devices
from kvlab.planning.sparse import expert_bytes
from kvlab.simulation.checked import CheckedTiming
from kvlab.simulation.timings import TIMINGS, Deployment, StepTiming
from kvlab.splitmix import STEP, mix

if TYPE_CHECKING:
    from kvlab.engine.sampler import Sampler


class SimulatedExecutor(Executor):
    """Draws a token for each sequence from its name and the token's position, never an end-of-sequence token, and
    takes the time that `timing` says, and that the `framework` costs beside it.
    """

    def __init__(self, model: DecoderConfig, timing: StepTiming, framework: FrameworkConfig) -> None:
        is_own = type(timing).__module__.startswith("kvlab.")
        self._timing, self._framework = timing if is_own else CheckedTiming(timing), framework
        # Groups of devices that share the sequences have a host process each.
        self._groups = model.division.data if isinstance(model, SparseConfig) else 1
        self._layers = model.num_layers
        tokens, ends = np.arange(model.vocab_size), np.array(model.eos_token_ids, np.int64)
        self._tokens = tokens[np.isin(tokens, ends, invert=True, kind="table")]

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        rows = step.sampled
        drawn = self._draw((step.sequences[row] for row in rows.tolist()), step.num_outputs[rows])
        device_s = self._timing.step_s(step.num_tokens, view, len(rows))
        return StepResult(
            drawn.tolist(), elapsed_s=self._with_host(device_s, len(step.sequences), len(step.token_ids))
        )

    def _with_host(self, device_s: float, sequences: int, tokens: int) -> float:
        """Seconds of a step with what the framework costs beside the devices; each host has its share."""
        if self._timing.includes_host:
            return device_s
        share = -(-sequences // self._groups), -(-tokens // self._groups)
        return self._framework.step_s(device_s, *share, self._layers)

    def run(
        self,
        specs: tuple[SequenceSpec, ...],
        num_outputs: NDArray[np.int64],
        new_tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], list[float]] | None:
        """See RunExecutor."""
        seconds = self._timing.run_s(new_tokens, lengths, len(specs))
        if seconds is None:
            return None
        work = len(new_tokens), int(new_tokens.sum())
        seconds = [self._with_host(device_s, *work) for device_s in seconds]
        outputs = num_outputs + np.arange(len(lengths))[:, None]
        return self._draw(specs, outputs), seconds

    def prompt_s(self, before: int, tokens: int, most: int) -> float:
        """Seconds that so many tokens of a prompt, `before` others before them, add to those behind them, of which
        there is at least one: alone on the device, in steps of at most `most`.
        """
        end = before + tokens + 1

        def step_s(chunk: int, length: int, sampled: int) -> float:
            return self._with_host(self._timing.device_s(np.array([chunk]), np.array([length]), sampled), 1, chunk)

        seconds, left = -step_s(1, end, 1), tokens + 1
        while left:
            chunk = min(left, most)
            left -= chunk
            seconds += step_s(chunk, end - left, int(not left))
        return seconds

    def _draw(self, specs: Iterable[SequenceSpec], num_outputs: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens `[..., S]` of S sequences that have so many outputs before."""
        seeds = np.array([_seed(spec.request_id, spec.index) for spec in specs], dtype=np.uint64)
        drawn = mix((seeds << np.uint64(32)) + num_outputs.astype(np.uint64) * STEP)
        tokens: NDArray[np.int64] = self._tokens[drawn % np.uint64(len(self._tokens))]
        return tokens


@lru_cache(maxsize=2**16)
def _seed(request_id: str, index: int) -> int:
    return crc32(f"{request_id} {index}".encode())


@EXECUTORS.register("simulated")
class SimulatedExecution(ExecutorKind):
    """On hardware that is described by the configuration."""

    @staticmethod
    def plan(config: EngineConfig, *, random_sampling: bool = True) -> EnginePlan:
        """Raises ConfigError without hardware, and for a model that cannot be divided among the devices."""
        hardware = config.hardware
        if hardware is None:
            raise ConfigError("hardware", None, "executor=simulated needs a device, as hardware=h100_sxm")
        if (method := config.scheduler.speculation.method) is not None:
            text = "executor=simulated computes no tokens, so that it cannot check proposed ones; leave it null"
            raise ConfigError("scheduler.speculation.method", method, text)
        planned = plan_on_devices(config, hardware)
        model, spec, weights, memory = planned.model, planned.spec, planned.weights, planned.memory or 0
        each = weights.parameters / weights.stored
        chosen = expert_bytes(model, planned.settings) if isinstance(model, SparseConfig) else 0
        sizes = (each, weights.body, weights.output, spec.bytes_per_token, chosen)
        timing = TIMINGS.get(config.executor.timing).of(Deployment(config, model, hardware, *sizes))
        if not isinstance(timing, StepTiming):
            text = f"its method `of` returned {shown(timing, repr)}; must be a StepTiming"
            raise ConfigError("executor.timing", config.executor.timing, text)
        if is_untimed(model) and not timing.includes_host:
            text = f"is a mixture of experts ({model.family}), of which a token reads a part: its steps are not"
            text += f" timed, those of {', '.join(SPARSE)} are; kvlab capacity plans its memory"
            raise ConfigError("model", config.model.name, text)
        kv = config.kv
        check_links(kv, hardware)
        if kv.num_blocks is None and kv.memory is None:
            check_devices(config, hardware, planned)
            kv = replace(kv, memory=f"{planned.left(memory)}B")
        pool = planned_pool(replace(config, kv=kv), spec)
        name = name_of_devices(hardware, config.executor.devices)
        memory += planned.working.peak - planned.taken  # steps have what they need in the rest
        return EnginePlan(config, name, model, weights, planned.working, pool, None, memory, timing, None)

    @staticmethod
    def build(plan: EnginePlan, *, sampler: Sampler | None = None) -> Execution:
        timing = plan.timing
        if not isinstance(timing, StepTiming):
            text = "the plan has no timing; plan it as simulated"
            raise ConfigError("executor.kind", plan.config.executor.kind, text)
        executor = SimulatedExecutor(plan.model, timing, plan.config.framework)
        return Execution(
            executor, LogicalClock(), None, tier_links(plan.config.hardware, plan.config.executor.devices)
        )


def is_untimed(model: DecoderConfig) -> bool:
    """Whether it is a mixture of experts whose steps no timing by operations knows."""
    return isinstance(model, TransformersConfig) and model.counts.experts > 0


def tier_links(hardware: HardwareConfig | None, devices: int) -> Links | None:
    """The links of simulated devices to host memory and its disk. Each device has one of its own to the host."""
    if hardware is None:
        return None
    host = devices * hardware.host_link_gb_s * 1e9 * hardware.host_link_efficiency
    rates = {
        "host": (host, host, hardware.host_link_us),
        "disk": (hardware.disk_write_gb_s * 1e9, hardware.disk_read_gb_s * 1e9, hardware.disk_us),
    }

    def links(tier: str) -> tuple[Link, Link]:
        down, up, microseconds = rates[tier]
        return SimulatedLink(down, microseconds * 1e-6), SimulatedLink(up, microseconds * 1e-6)

    return links


def check_links(kv: KVConfig, hardware: HardwareConfig) -> None:
    """Raise ConfigError for tiers whose links have no bandwidth."""
    for key, room, name, example in (
        ("kv.offload", kv.offload, "host_link_gb_s", "64 (PCIe 5)"),
        ("kv.offload_disk", kv.offload_disk, "disk_read_gb_s", "6.8"),
        ("kv.offload_disk", kv.offload_disk, "disk_write_gb_s", "4"),
    ):
        if room is not None and not getattr(hardware, name):
            text = f"{key}={room} copies blocks with this bandwidth; set it, as {example}"
            raise ConfigError(f"hardware.{name}", getattr(hardware, name), text)
