"""The simulated executor: its tokens, its memory, and that an engine decides the same whatever computes a step."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import yaml

from kvlab.config import EngineConfig, HardwareConfig, KVConfig, ModelConfig, SchedulerConfig
from kvlab.config.executor import ExecutorConfig
from kvlab.config.scheduler import PreemptionConfig
from kvlab.core import Request, RequestRecord, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.clock import LogicalClock
from kvlab.engine.executors.simulated import SimulatedExecutor
from kvlab.engine.step import Executor, StepInput, StepResult
from kvlab.errors import CapacityError, ConfigError
from kvlab.kv.journal import BlockJournal
from kvlab.kv.view import CacheView
from kvlab.lab.capacity import plan_capacity
from kvlab.lab.results.columns import step_row
from kvlab.lab.results.log import RunLog
from kvlab.lab.run.drive import drive
from kvlab.lab.run.playback import Playback
from kvlab.paths import CONF
from kvlab.registry import registry
from kvlab.simulation.recording import Outputs, Recording
from tests.support.plans import composed

HARDWARE = HardwareConfig(
    name="small",
    memory="2GiB",
    bandwidth_gb_s=10,
    tflops={"float32": 1, "bfloat16": 2},
    host_link_gb_s=0.001,  # so that a load takes several steps
)
TINY = yaml.safe_load((CONF / "model" / "qwen3_tiny.yaml").read_text())
TINY["architecture"]["num_hidden_layers"] = 1  # what an engine decides depends on no more
Tokens = dict[tuple[str, int], tuple[int, ...]]


class Timed(Executor):
    """Another executor, whose n-th step takes a time of the test's choice."""

    def __init__(self, inner: Executor) -> None:
        self._inner, self._step = inner, count()

    def execute(self, step: StepInput, view: CacheView) -> StepResult:
        result = self._inner.execute(step, view)
        return replace(result, elapsed_s=0.010 + 0.007 * (next(self._step) % 3))


def config(kind: str, **settings: Any) -> EngineConfig:
    return EngineConfig(
        ModelConfig(**TINY, max_seq_len=96),
        executor=ExecutorConfig(kind=kind, device="cpu" if kind == "torch" else "auto", dtype="float32", threads=1),
        hardware=HARDWARE if kind == "simulated" else None,
        **settings,
    )


def traffic() -> list[Request]:
    """Prompts with common beginnings, priorities and deadlines, which arrive while others run."""
    rng = np.random.default_rng(0)
    shared = tuple(rng.integers(1, 60, 16).tolist())
    return [
        Request(
            f"r{index}",
            (*shared[: 16 * (index % 2)], *rng.integers(1, 60, int(rng.integers(3, 30))).tolist()),
            SamplingParams(max_tokens=int(rng.integers(4, 24)), ignore_eos=True, n=1 + (index == 3)),
            arrival_s=0.012 * index,
            priority=index % 3,
            deadline_s=float(rng.integers(1, 9)),
        )
        for index in range(8)
    ]


def served(kind: str, settings: dict[str, Any], recorded: RunLog | None = None) -> RunLog:
    """A run in steps of the test's choice, or one that plays back what was recorded of another."""
    plan = plan_engine(config(kind, **settings))
    if recorded is None:
        engine = build_engine(plan, journal=BlockJournal(), wrap=Timed)
        engine.clock = LogicalClock()
        log = drive(engine, traffic())
    else:
        recording = recording_of(recorded)
        plan.config.executor.kind = "playback"
        engine = build_engine(replace(plan, recording=recording), journal=BlockJournal())
        assert isinstance(engine.clock, LogicalClock)
        playback = Playback(recording, engine.clock, {})
        log = drive(engine, traffic(), on_step=lambda _, step: playback.after(step) if step is not None else None)
    assert engine.journal is not None
    log.blocks = engine.journal.columns(record.key for record in log.records)
    return log


def recording_of(log: RunLog) -> Recording:
    outputs = {each.key: Outputs(each.output_token_ids, each.token_times_s) for each in log.records}
    return Recording("nowhere", [step_row(step) for step in log.steps], outputs)


def steps(log: RunLog) -> list[dict[str, Any]]:
    """Every record whole, but for the bytes of the pool's tensors: simulated, it has none."""
    rows = [asdict(step) for step in log.steps]
    for row in rows:
        row["pool"] = row["pool"]._replace(kv_bytes=0)
    return rows


def events(log: RunLog) -> list[list[int]]:
    found = log.blocks
    assert found is not None
    return [column.tolist() for column in (found.step, found.event, found.block, found.sequence)]


POOLS: tuple[dict[str, Any], ...] = (
    {"backend": "paged", "prefix_sharing": False},
    {"backend": "contiguous"},
    *({"backend": "paged", "eviction": policy} for policy in registry("kv.eviction").names()),
)


ORDERS, VICTIMS = registry("scheduler.order").names(), registry("scheduler.preemption.victim").names()


@pytest.mark.parametrize("order", ORDERS)
def test_an_engine_decides_the_same_whatever_computes_its_steps(order: str) -> None:
    """Each order with each pool, each of these two with each victim."""
    preempted = evicted = hits = 0
    for number, pool in enumerate(POOLS, ORDERS.index(order)):
        victim = VICTIMS[number % len(VICTIMS)]
        blocks = 12 if pool["backend"] == "paged" else 24
        settings = {
            "kv": KVConfig(num_blocks=blocks, block_size=8, **pool),
            "scheduler": SchedulerConfig(
                order=order,
                max_batch_size=6,
                max_batched_tokens=24,
                admission_reserve=0,
                preemption=PreemptionConfig(victim=victim),
            ),
        }
        real = served("torch", settings)
        simulated = served("simulated", settings, real)
        assert steps(simulated) == steps(real)
        assert simulated.records == real.records
        assert events(simulated) == events(real)
        counters = [step.counters for step in real.steps if step.counters is not None]
        preempted += sum(step.preempted for step in real.steps)
        evicted += sum(each.evicted_blocks for each in counters)
        hits += sum(each.hit_tokens for each in counters)
    assert min(preempted, evicted, hits) > 0


def outputs(records: list[RequestRecord]) -> Tokens:
    return {record.key: record.output_token_ids for record in records}


class TestTokens:
    def test_depend_on_the_request_and_the_position_alone(self) -> None:
        found = []
        for batch in (6, 1):
            engine = build_engine(plan_engine(config("simulated", scheduler=SchedulerConfig(max_batch_size=batch))))
            found.append(outputs(drive(engine, traffic()).records))
        assert found[0] == found[1]
        assert found[0]["r3", 0] != found[0]["r3", 1]

    def test_never_end_a_sequence(self) -> None:
        plan = plan_engine(config("simulated"))
        plan = replace(plan, model=replace(plan.model, eos_token_ids=tuple(range(plan.model.vocab_size - 2))))
        asked = replace(traffic()[0], sampling=SamplingParams(max_tokens=40), arrival_s=0.0)
        (record,) = drive(build_engine(plan), [asked]).records
        assert len(record.output_token_ids) == 40
        assert set(record.output_token_ids) == {plan.model.vocab_size - 2, plan.model.vocab_size - 1}

    def test_a_step_takes_the_time_that_its_timing_says(self) -> None:
        engine = build_engine(plan_engine(config("simulated")))
        log = drive(engine, [replace(traffic()[0], arrival_s=5.0)])
        assert log.steps[0].start_s == 5.0
        assert all(step.end_s > step.start_s for step in log.steps if step.batch_seqs)
        assert isinstance(engine._runner.executor, SimulatedExecutor)


class TestMemory:
    def test_the_cache_gets_what_weights_and_steps_leave(self) -> None:
        plan = plan_engine(config("simulated"))
        left = 0.9 * 2**31 - plan.weights.total - plan.working.peak
        assert 0 <= left - plan.pool.num_bytes < plan.pool.block_size * plan.pool.bytes_per_token

    def test_each_device_has_memory_and_needs_its_own_for_steps(self) -> None:
        chosen = ("executor=simulated", "model=qwen3_8b", "hardware=h100_sxm")
        one, two = (plan_engine(composed(*chosen, f"executor.tensor_parallel={count}")) for count in (1, 2))
        assert two.memory == 2 * int(0.92 * (81559 - 480) * 2**20) - two.working.peak
        assert two.pool.num_blocks > 2 * one.pool.num_blocks  # the weights are there once
        assert two.working.small > one.working.small + 2**28  # buffers of collectives

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"hardware": None}, "hardware=null: executor=simulated needs a device, as hardware=h100_sxm"),
            ({"executor.tensor_parallel": 3}, "tensor_parallel=3: qwen3_tiny has 4 query heads and 2 KV heads"),
            ({"executor.tensor_parallel": 2}, "executor.tensor_parallel=2: small has no hardware.link_gb_s"),
            (
                {"executor.dtype": "float16"},
                "float16: hardware.tflops of small has float32, bfloat16",
            ),
            ({"executor.kind": "torch"}, "hardware=small: can only be simulated; use executor=simulated"),
        ],
    )
    def test_what_cannot_be_simulated_is_a_sentence(self, changed: dict[str, Any], message: str) -> None:
        settings = config("simulated")
        for key, value in changed.items():
            group, _, name = key.rpartition(".")
            setattr(getattr(settings, group) if group else settings, name, value)
        with pytest.raises(ConfigError) as raised:
            plan_engine(settings)
        assert message in str(raised.value)

    def test_a_model_that_does_not_fit_is_told_how_many_devices_would_do(self) -> None:
        large = composed("executor=simulated", "model=qwen3_32b", "hardware=l40s")
        with pytest.raises(CapacityError, match=r"which is less; executor\.tensor_parallel=2 would do") as raised:
            plan_engine(large)
        assert "qwen3_32b needs" in str(raised.value)
        assert plan_engine(replace(large, executor=replace(large.executor, tensor_parallel=2))).pool.num_blocks > 0

    def test_the_devices_of_a_share_that_goes_by_their_number_would_do(self) -> None:
        """SGLang's default: 0.704 of an RTX 4090, and 0.533 of each of 32, which are too few then."""
        chosen = "executor=simulated", "model=qwen3_235b_a22b", "hardware=rtx_4090", "framework=sglang"
        with pytest.raises(CapacityError, match=r"which is less; executor\.tensor_parallel=64 would do"):
            plan_engine(composed(*chosen))
        with pytest.raises(CapacityError):
            plan_engine(composed(*chosen, "executor.tensor_parallel=32"))
        assert plan_engine(composed(*chosen, "executor.tensor_parallel=64")).pool.num_blocks > 0

    @pytest.mark.parametrize("devices", [1, 4])
    @pytest.mark.parametrize(
        "stored",
        ["kv.dtype=auto", "kv.dtype=int8", "kv.dtype=fp8_e5m2", "executor.weights=fp8", "executor.weights=int8"],
    )
    def test_the_planner_gives_a_simulated_run_the_same_cache(self, devices: int, stored: str) -> None:
        chosen = ("model=qwen3_8b", "hardware=h100_sxm", f"executor.tensor_parallel={devices}", stored)
        asked = composed("executor=simulated", *chosen)
        found, run = plan_capacity(asked, device="cuda"), plan_engine(asked, random_sampling=False)
        assert found.pools["paged"] == run.pool
        assert (found.memory, found.device) == (run.memory, run.device)
