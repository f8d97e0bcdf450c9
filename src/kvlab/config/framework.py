"""The serving framework that a simulated device stands for: whose kernels run on it, and what its host costs."""

import re
from dataclasses import dataclass

from kvlab.config.values import all_at_least, one_of
from kvlab.errors import ConfigError

FP8_SCALES = ("dynamic", "static", "block")
EXPERT_KERNELS = ("tables", "trtllm_gen", "triton", "cutlass")
NEWEST_VLLM, NEWEST_SGLANG = "0.33", "0.5.23"  # whose defaults and memory an unset version has
ASYNCHRONOUS = (0, 14)  # the first vLLM that schedules a step during the one before by default


@dataclass
class FrameworkConfig:
    """What a step costs on the host, beside the device's work; and the framework's name in measured tables."""

    name: str = "vllm"  # what it is called in tables and runs
    tables: str = "vllm"  # timing=silicon: whose kernels were measured: vllm, sglang or trtllm
    fp8_scales: str = "dynamic"  # timing=silicon: of fp8's activations: dynamic, static or block (weights too)
    expert_kernels: str = "tables"  # timing=silicon: of experts: its tables', trtllm_gen; vLLM's triton or cutlass
    version: str | None = None  # timing=silicon: of the framework whose kernels were measured; null: the newest
    flashinfer_sampler: bool | None = None  # FlashInfer samples at vLLM's start (0.28 to 0.32: no); null: from 0.21
    cuda_graphs: bool = True  # false: eager, as with vLLM's --enforce-eager and SGLang's --disable-cuda-graph
    eager_layer_us: float | None = None  # cuda_graphs=false: of the host for a layer; null: steps as with graphs
    fused_allreduce_mib: float | None = None  # timing=silicon: of all-reduces that end in a norm; null: its own
    device_token_us: float = 0.0  # timing=silicon: of all devices, for a token, beyond the measured operations
    step_us: float = 200.0  # of the host, for a step
    prompts_us: float = 0.0  # of the host, to launch a step with prompts, which no graph holds: it takes no less
    sequence_us: float = 3.0  # of the host, for each sequence in a step
    token_us: float = 0.0  # of the host, for each token in a step
    overlap: bool = False  # the host prepares a step while the device computes the one before
    request_us: float = 0.0  # of the front end, for a request, one after the other
    prompt_token_us: float = 0.0  # of the front end, for each token of a prompt
    output_token_us: float = 0.0  # of the front end, for each token that it sends

    def __post_init__(self) -> None:
        one_of("framework.fp8_scales", self.fp8_scales, FP8_SCALES)
        one_of("framework.expert_kernels", self.expert_kernels, EXPERT_KERNELS)
        of_steps = ("step_us", "prompts_us", "sequence_us", "token_us", "device_token_us", "eager_layer_us")
        others = ("request_us", "prompt_token_us", "output_token_us", "fused_allreduce_mib")
        all_at_least("framework", self, (*of_steps, *others), 0)

    @property
    def vllm_key(self) -> tuple[int, ...] | None:
        """Which vLLM is simulated, to compare with; None: another framework. Raises ConfigError for the version."""
        is_vllm = self.name.startswith("vllm")
        return version_key(simulated_version(self.name, self.version)) if is_vllm else None

    @property
    def other_schedule(self) -> str | None:
        """That the version scheduled steps otherwise than the host's times are for, in words; None: it did not."""
        key = self.vllm_key
        if self.name != "vllm" or key is None or key >= ASYNCHRONOUS:
            return None
        return (
            f"framework.version={self.version} is of a vLLM that scheduled a step when the one before had ended, "
            "and took longer to: framework=vllm_synchronous has its times of the host"
        )

    def host_s(self, sequences: int, tokens: int) -> float:
        """Seconds of the host for a step of so many sequences and tokens."""
        return (self.step_us + self.sequence_us * sequences + self.token_us * tokens) * 1e-6

    def step_s(self, device_s: float, sequences: int, tokens: int, layers: int) -> float:
        """Seconds of a step of so many layers whose work takes the device `device_s`. Without CUDA graphs it takes
        no less than the host needs for its layers, all else that the host does included.
        """
        if tokens > sequences:
            device_s = max(device_s, self.prompts_us * 1e-6)
        host_s = self.host_s(sequences, tokens)
        step_s = max(device_s, host_s) if self.overlap else device_s + host_s
        if self.cuda_graphs or self.eager_layer_us is None:
            return step_s
        return max(step_s, layers * self.eager_layer_us * 1e-6)


def version_key(version: str) -> tuple[int, ...]:
    """As 0.19.0: (0, 19, 0), to compare with. Raises ConfigError for framework.version."""
    if not re.match(r"\d+\.\d+", version):
        raise ConfigError("framework.version", version, "must be a version, as 0.24.0")
    if re.fullmatch(r"0\.[1-4]", version):  # older than anything that is known, or the number 0.10
        text = f"may be {version}0, which was read as a number; write {version}0.0"
        raise ConfigError("framework.version", version, text)
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def simulated_version(framework: str, version: str | None) -> str:
    """Of vLLM or SGLang that is simulated as `framework`, its name in conf/framework."""
    return version or {"vllm_synchronous": "0.12", "sglang": NEWEST_SGLANG}.get(framework, NEWEST_VLLM)
