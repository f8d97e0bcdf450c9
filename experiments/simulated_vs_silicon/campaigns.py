"""The measured deployments that are simulated: which rows of the package's sample, and how they were measured."""

from __future__ import annotations

from collections.abc import Iterator
from csv import DictReader
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

_WEIGHTS = {"": "auto", "fp8": "fp8", "fp8_block": "fp8"}  # the sample's types; the tables of fp8 stand for both
SIMULATED = 3  # waves of requests: the first, the last, and one that stands for all between them


@dataclass(frozen=True, slots=True)
class Row:
    """A deployment that was measured in a closed loop."""

    id: str
    prompt: int  # tokens
    output: int
    concurrency: int
    devices: int
    weights: str
    ttft_ms: float
    tpot_ms: float

    @property
    def held_out(self) -> bool:
        """Whether errors are reported on it; coefficients are fitted on the others."""
        return crc32(self.id.encode()) % 2 == 1


@dataclass(frozen=True, slots=True)
class Campaign:
    """Deployments of one model, framework and device that were measured in one way.

    `waves`, `idle_slots`, `most_running` and the latency are not published, or only in part: see the README. What
    limits the rate of a front end is `framework.request_us` and its like, of conf/framework.
    """

    name: str
    model: str  # model_path, backend and system of the sample
    backend: str
    system: str
    overrides: tuple[str, ...]
    waves: int  # requests for each of the client's slots
    shortest: tuple[float, float]  # lengths of prompts and outputs are uniform from this share of the longest on
    latency_ms: float = 0.0  # of network, HTTP and the client, for a request, however many there are
    latency_us: float = 0.0  # likewise, for each token of the prompt
    idle_slots: int = 0  # by which the server runs fewer sequences than the client has open
    most_running: int = 2**31  # sequences that the server runs at once, whatever the client has open

    def settings(self, row: Row) -> list[str]:
        """What `kvlab run` would take for a row."""
        prompt, output = self.shortest
        return [
            "executor=simulated",
            "executor.timing=silicon",
            f"hardware={self.system}",
            f"executor.tensor_parallel={row.devices}",
            f"executor.weights={row.weights}",
            "kv=paged_unshared",
            f"model.max_seq_len={row.prompt + row.output + 8}",
            f"scheduler.max_batch_size={min(row.concurrency - self.idle_slots, self.most_running)}",
            "scheduler.admission_reserve=0",
            "scheduler.aging_s=null",
            "workload.name=closed",
            f"workload.num_requests={SIMULATED * row.concurrency}",
            f"workload.concurrency={row.concurrency}",
            f"workload.prompt_len={{min: {round(prompt * row.prompt)}, max: {row.prompt}}}",
            f"workload.output_len={{min: {round(output * row.output)}, max: {row.output}}}",
            *self.overrides,
        ]

    def rows(self) -> Iterator[Row]:
        """The rows of the sample that belong to it."""
        with sample().open(newline="") as file:
            for each in DictReader(file):
                if (each["mode"], each["model_path"]) != ("agg", self.model):
                    continue
                if (each["backend"], each["system"]) != (self.backend, self.system):
                    continue
                yield Row(
                    each["id"],
                    int(each["isl"]),
                    int(each["osl"]),
                    int(float(each["batch_size"])),
                    int(float(each["tp_size"])),
                    _WEIGHTS[each["gemm_quant_mode"]],
                    float(each["silicon_ttft_ms"]),
                    float(each["silicon_tpot_ms"]),
                )


def sample() -> Path:
    """The package's file of measured deployments."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise SystemExit("needs the measured deployments of aiconfigurator-core: pip install 'kvlab[silicon]'")
    return Path(spec.origin).parent / "systems" / "silicon_sample.csv"


_PUBLISHED = (
    0.8,
    0.8,
)  # InferenceMAX draws lengths from 0.8 of the longest on, and sends 10 requests for each slot
_VARIED = (1.0, 0.95)  # prompts of one length; outputs that vary enough for requests not to stay in step
_BUDGET = "scheduler.max_batched_tokens=8192"
_FP8_CACHE = "kv.dtype=fp8_e4m3"
_70B = ("model=llama3_1_70b", "framework=vllm", "framework.fp8_scales=static", _BUDGET)
_TRTLLM = ("framework=trtllm", "framework.fp8_scales=block", "scheduler.reserve_output=true", _BUDGET)
_SGLANG = ("framework=sglang", "framework.fp8_scales=block", "scheduler.mixed=false", _BUDGET)

CAMPAIGNS = (
    Campaign(
        "Llama 3.1 70B fp8, vLLM, H100",
        model="meta-llama/Llama-3.1-70B",
        backend="vllm",
        system="h100_sxm",
        overrides=_70B,
        waves=10,
        shortest=_PUBLISHED,
        latency_ms=12,
    ),
    Campaign(
        "Llama 3.1 70B fp8, vLLM, H200",
        model="meta-llama/Llama-3.1-70B",
        backend="vllm",
        system="h200_sxm",
        overrides=(*_70B, _FP8_CACHE),
        waves=10,
        shortest=_PUBLISHED,
        latency_ms=12,
    ),
    Campaign(
        "Qwen3 32B, vLLM 0.12, H100",
        model="Qwen/Qwen3-32B",
        backend="vllm",
        system="h100_sxm",
        overrides=("model=qwen3_32b", "framework=vllm_synchronous", "framework.fp8_scales=block", _BUDGET),
        waves=15,
        shortest=_VARIED,
        latency_us=40,
    ),
    Campaign(
        "Qwen3 32B fp8, TensorRT-LLM, H100",
        model="Qwen/Qwen3-32B",
        backend="trtllm",
        system="h100_sxm",
        overrides=("model=qwen3_32b", *_TRTLLM, _FP8_CACHE),
        waves=15,
        shortest=_VARIED,
        latency_us=70,
    ),
    Campaign(
        "Llama 3.1 8B, TensorRT-LLM, H100",
        model="meta-llama/Llama-3.1-8B-Instruct",
        backend="trtllm",
        system="h100_sxm",
        overrides=("model=llama3_1_8b", *_TRTLLM),
        waves=20,
        shortest=_VARIED,
        latency_ms=20,
        idle_slots=1,
    ),
    Campaign(
        "Llama 3.1 8B fp8, SGLang, H200",
        model="meta-llama/Llama-3.1-8B-Instruct",
        backend="sglang",
        system="h200_sxm",
        overrides=("model=llama3_1_8b", *_SGLANG),
        waves=10,
        shortest=_VARIED,
        most_running=488,
    ),
    Campaign(
        "Llama 3.1 8B fp8, vLLM 0.12, H200",
        model="nvidia/Llama-3.1-8B-Instruct-FP8",
        backend="vllm",
        system="h200_sxm",
        overrides=("model=llama3_1_8b", "framework=vllm_synchronous", "framework.fp8_scales=static", _BUDGET),
        waves=10,
        shortest=_VARIED,
    ),
    Campaign(
        "Qwen3 32B, SGLang, H100",
        model="Qwen/Qwen3-32B",
        backend="sglang",
        system="h100_sxm",
        overrides=("model=qwen3_32b", *_SGLANG),
        waves=10,
        shortest=_VARIED,
    ),
)
