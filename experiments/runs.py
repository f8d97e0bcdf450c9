"""What the experiments on whole runs share: a configuration in, its figures and its log out, in this process."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

from kvlab.cli.compose import compose_run
from kvlab.config import RunConfig
from kvlab.engine.build import build_engine
from kvlab.errors import AuditError
from kvlab.lab.results.log import RunLog
from kvlab.lab.results.metrics import run_metrics
from kvlab.lab.run.drive import drive
from kvlab.lab.run.plan import RunPlan, plan_run

#: The simulated device of experiments on scheduling and on the cache. The cost of the host is an assumption. With
#: framework=kvlab the pool has what vLLM's start would keep of it.
SIMULATED_L4 = (
    "executor=simulated",
    "framework=kvlab",
    "hardware=l4",
    "tracking=off",
    "model=qwen3_8b",
    "model.max_seq_len=16384",
    "kv=paged",
    "executor.memory_utilization=0.95",
    "framework.step_us=200",
    "framework.sequence_us=3",
    "framework.token_us=0",
)


def configure(overrides: list[str]) -> RunConfig:
    """The configuration that `kvlab run <overrides>` would have."""
    return compose_run(overrides).config


def measure(config: RunConfig) -> tuple[RunPlan, RunLog, dict[str, float]]:
    """Run it in a fresh engine. AuditError if the pool is unsound then, RuntimeError if a request is lost."""
    plan = plan_run(config)
    engine = build_engine(plan)
    log = drive(engine, plan.requests)
    if findings := engine.pool.audit():
        raise AuditError("; ".join(map(str, findings)))
    expected = sum(request.sampling.n for request in plan.requests)
    if log.completed != expected:
        raise RuntimeError(f"{log.completed} of {expected} sequences completed")
    metrics = run_metrics(log, plan.pool, leaked_blocks=0)
    del engine
    gc.collect()
    return plan, log, metrics


def scheduled(config: RunConfig, **settings: Any) -> RunConfig:
    """The same run with other fields of its scheduler."""
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **settings))
