"""The executor and its attention backend: where and how the model runs."""

from dataclasses import dataclass, field

from kvlab.config.values import all_at_least, one_of
from kvlab.errors import ConfigError
from kvlab.registry import registry

DTYPES = ("float32", "bfloat16", "float16")
SIMULATED_WEIGHTS = ("fp8", "nvfp4", "int4_wo")  # of simulated devices: kvlab.planning.formats
W8A8 = "int8_w8a8"  # products in integers: activations are rounded to int8, too, with a scale for each token
PACKED_WEIGHTS = ("compact", "int8", W8A8)  # formats of kvlab's kernels for CPUs
WEIGHTS = ("auto", "plain", *PACKED_WEIGHTS, *SIMULATED_WEIGHTS)
DEVICES = ("auto", "cpu", "cuda")
BATCHING = ("ragged", "per_sequence")


@dataclass
class AttentionConfig:
    """How attention over the cache is computed: a backend's name, or `auto`."""

    backend: str = "auto"  # auto: of those that can compute the model here, the one of the highest preference
    prefer: list[str] = field(default_factory=list)  # backends that auto tries first, in this order

    def __post_init__(self) -> None:
        if self.backend != "auto":
            registry("attention.backend").check(self.backend)
        for name in self.prefer:
            registry("attention.backend").check(name, key="attention.prefer")


@dataclass
class ExecutorConfig:
    """What runs the model, and where."""

    kind: str = "torch"  # torch: PyTorch and kvlab's kernels; simulated: a device; playback: a recorded run
    device: str = "auto"  # cpu, cuda, or auto: cuda where there is one
    dtype: str = "bfloat16"  # of weights and activations: float32, bfloat16 or float16
    weights: str = "auto"  # exact: plain or compact; int8, int8_w8a8; of simulated devices: fp8, nvfp4, int4_wo
    batching: str = "ragged"  # ragged: one forward pass for all sequences of a step; per_sequence: one for each
    threads: int | None = None  # CPU threads of each process; null: all cores that it may use, shared
    tensor_parallel: int = 1  # processes, or simulated devices, among which heads and matrices are divided
    attention_data_parallel: int = 1  # simulated: groups of so many devices that share the sequences; for experts
    expert_parallel: int = 1  # simulated: devices among which experts are divided by number, not by matrices
    memory_utilization: float = 0.9  # simulated: share of the memory to take; vllm 0.92, sglang by device
    timing: str = "auto"  # simulated: where the time of a step comes from; auto: silicon, else roofline
    timing_path: str | None = None  # simulated: the file or directory that the timing reads, if it reads one
    recording: str | None = None  # playback: the directory of the run that is played back
    kernels: bool = True  # false: PyTorch computes everything, and attention.backend=auto takes no kernel

    def __post_init__(self) -> None:
        registry("executor.kind").check(self.kind)
        registry("executor.timing").check(self.timing)
        one_of("executor.device", self.device, DEVICES)
        one_of("executor.dtype", self.dtype, DTYPES)
        one_of("executor.weights", self.weights, WEIGHTS)
        one_of("executor.batching", self.batching, BATCHING)
        groups = ("tensor_parallel", "attention_data_parallel", "expert_parallel")
        all_at_least("executor", self, ("threads", *groups), 1)
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError("executor.memory_utilization", self.memory_utilization, "must be in (0, 1]")

    @property
    def devices(self) -> int:
        """Simulated devices of an engine."""
        return self.tensor_parallel * self.attention_data_parallel

    @property
    def all_threads(self) -> int | None:
        """`threads` of all processes; None: not set."""
        return None if self.threads is None else self.threads * self.tensor_parallel

    @property
    def weights_dtype(self) -> str:
        """What the numbers of the matrices are rounded to."""
        return self.dtype if self.weights in ("auto", "plain", "compact") else self.weights

    @property
    def products(self) -> str:
        """What products with the matrices multiply: `dtype`, to which other formats are widened, or `int8_w8a8`."""
        return W8A8 if self.weights == W8A8 else self.dtype
