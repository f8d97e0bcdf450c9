"""The settings of an engine: all that a run has but its workload and its records."""

from dataclasses import dataclass, field

from kvlab.config.executor import AttentionConfig, ExecutorConfig
from kvlab.config.framework import FrameworkConfig
from kvlab.config.hardware import HardwareConfig
from kvlab.config.kv import KVConfig
from kvlab.config.model import ModelConfig
from kvlab.config.scheduler import SchedulerConfig
from kvlab.config.values import MOST_SEED, at_least
from kvlab.errors import ConfigError


@dataclass
class EngineConfig:
    """What an engine is built from: model, memory, scheduler, attention and executor."""

    model: ModelConfig = field(default_factory=ModelConfig)  # the model
    kv: KVConfig = field(default_factory=KVConfig)  # the KV cache
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)  # the scheduler
    attention: AttentionConfig = field(default_factory=AttentionConfig)  # the attention backend
    executor: ExecutorConfig = field(default_factory=ExecutorConfig)  # what runs the model
    hardware: HardwareConfig | None = None  # the device that executor=simulated simulates
    framework: FrameworkConfig = field(default_factory=FrameworkConfig)  # whose kernels and host it has then
    seed: int = 0  # of random weights; a run also draws its workload with it

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0, MOST_SEED)
        if self.hardware is not None and not self.hardware.cuda and self.framework.tables == "trtllm":
            text = f"runs on NVIDIA's devices alone, and hardware={self.hardware.name} is none; take vllm or sglang"
            raise ConfigError("framework", self.framework.name, text)
        mode = self.scheduler.preemption.mode
        if mode != "recompute" and self.kv.offload is None and self.kv.offload_disk is None:
            text = "copies blocks to host memory, and kv.offload=null has none; set it, as kv.offload=4GiB"
            raise ConfigError("scheduler.preemption.mode", mode, text)

    @property
    def kv_dtypes(self) -> tuple[str, str]:
        """What K and what V are stored in."""
        key, value = (self.kv.key_dtype or self.kv.dtype, self.kv.value_dtype or self.kv.dtype)
        own = self.executor.dtype
        return own if key == "auto" else key, own if value == "auto" else value

    @property
    def kv_dtype(self) -> str:
        """The same in words."""
        key, value = self.kv_dtypes
        return key if key == value else f"{key} and {value}"
