"""What is known of an engine before a byte of it is allocated."""

from dataclasses import dataclass
from typing import NamedTuple

from kvlab.attention.base import AttentionBackend, AttentionSpec
from kvlab.config import EngineConfig
from kvlab.errors import ConfigError
from kvlab.kv.sizing import PoolSize
from kvlab.models.config import DecoderConfig, TransformersConfig
from kvlab.models.ops.base import Ops
from kvlab.planning.memory import WeightBytes, WorkingMemory
from kvlab.simulation.recording import Recording
from kvlab.simulation.timings import Timing


class Kernels(NamedTuple):
    """What computes a model on this machine."""

    attention: AttentionBackend
    specs: tuple[AttentionSpec, ...]  # of each layer
    ops: Ops
    threads: int  # of the CPU


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """A checked engine: everything that is known before a byte of it is allocated.

    `device` is "cpu" or "cuda", where `kernels` compute; or the name of hardware that is simulated, with the bytes
    of `memory` that the engine may take.
    """

    config: EngineConfig
    device: str
    model: DecoderConfig
    weights: WeightBytes
    working: WorkingMemory
    pool: PoolSize
    kernels: Kernels | None
    memory: int | None  # None: what the device has left
    timing: Timing | None  # of simulated hardware
    recording: Recording | None  # of a run that is played back

    @property
    def is_real(self) -> bool:
        """Whether the model is computed, and steps take the time that they take."""
        return self.kernels is not None

    @property
    def cpu_threads(self) -> int:
        """Threads of the CPU that compute, of all ranks; 0: it does not."""
        if self.kernels is None or self.device != "cpu":
            return 0
        return self.kernels.threads * self.config.executor.tensor_parallel

    @property
    def chosen(self) -> dict[str, str | int]:
        """What was chosen for settings that are `auto`, and how steps are timed if they are not computed."""
        if self.recording is not None:
            return {"device": self.device, "timing": f"playback of {self.recording.source}"}
        if self.timing is not None:
            return {"device": self.device, "timing": self.timing.description}
        attention, _, ops, threads = self.computed_by
        kernels = "transformers" if isinstance(self.model, TransformersConfig) else ops.name
        return {"attention": attention.name, "kernels": kernels, "device": self.device, "threads": threads}

    @property
    def weights_format(self) -> str:
        """How matrices are stored: `plain`, or as kvlab's kernels store them. `weights` counts 16 bits for what
        `executor.weights=auto` stores in 12, since the same plan is made for other machines.
        """
        if self.kernels is None or isinstance(self.model, TransformersConfig):
            return "plain"
        return self.kernels.ops.weights

    @property
    def computed_by(self) -> Kernels:
        """The kernels. Raises ConfigError for hardware that is simulated."""
        if self.kernels is None:
            raise ConfigError(
                "executor.kind", self.config.executor.kind, "computes nothing; use executor.kind=torch"
            )
        return self.kernels
