"""Typed settings, one module per group, checked when they are built: the only schema of a run.

The classes are plain dataclasses whose field types OmegaConf understands, so that the commands can hand them to
Hydra; nothing here imports either.
"""

from kvlab.config.debug import DebugConfig, FaultsConfig
from kvlab.config.engine import EngineConfig
from kvlab.config.engine_choice import EngineChoiceConfig
from kvlab.config.executor import AttentionConfig, ExecutorConfig
from kvlab.config.fleet import FleetConfig
from kvlab.config.framework import FrameworkConfig
from kvlab.config.hardware import HardwareConfig
from kvlab.config.kv import KVConfig
from kvlab.config.model import ModelConfig
from kvlab.config.run import RunConfig
from kvlab.config.scheduler import PreemptionConfig, SchedulerConfig, SpeculationConfig
from kvlab.config.slo import SloConfig
from kvlab.config.tracking import TrackingConfig
from kvlab.config.values import format_bytes, parse_bytes
from kvlab.config.workload import LengthConfig, WorkloadConfig

__all__ = [
    "AttentionConfig", "DebugConfig", "EngineChoiceConfig", "EngineConfig", "ExecutorConfig", "FaultsConfig",
    "FleetConfig", "FrameworkConfig", "HardwareConfig", "KVConfig", "LengthConfig", "ModelConfig",
    "PreemptionConfig", "RunConfig", "SchedulerConfig", "SloConfig", "SpeculationConfig", "TrackingConfig",
    "WorkloadConfig", "format_bytes", "parse_bytes",
]  # fmt: skip
