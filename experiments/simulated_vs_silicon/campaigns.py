"""How the measured deployments were configured and measured: what a simulation of each is given.

InferenceMAX publishes its scripts (SemiAnalysisAI/InferenceX; those of Llama 3.1 70B up to commit c198b20eb):
lengths are uniform from 0.8 of the longest on, and a client sends ten requests for each of its slots, all slots at
once. How the other rows were measured is not published; the README says what is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.simulated_vs_silicon.sample import Row
from experiments.simulated_vs_silicon.scripts import (
    FP8_CACHE,
    batch_waiting,
    deepseek_trtllm,
    divided,
    gpt_oss_trtllm,
    gpt_oss_vllm,
    kimi,
    llama_70b_vllm,
    minimax,
    polled,
    sglang,
    static_memory,
)

SIMULATED = 3  # waves of requests: the first, the last, and one that stands for all between them
#: Types of matrices as the sample calls them, and as `executor.weights` does; tables of fp8 stand for both.
TYPES = {"bfloat16": "auto", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4"}
#: The same of checkpoints that name it.
_AS_STORED = {"fp8": "auto", "fp8_block": "auto", "int4_wo": "auto", "nvfp4": "nvfp4"}


def _nothing(row: Row) -> list[str]:
    return []


@dataclass(frozen=True, slots=True)
class Campaign:
    """Deployments of one model and framework that were measured in one way.

    `waves`, `idle_slots`, `most_running` and the latency are not published, or only in part: see the README. What
    limits the rate of a front end is `framework.request_us` and its like, of conf/framework.
    """

    name: str
    models: tuple[str, ...]  # as the sample calls them, as it does the backend
    backend: str
    overrides: tuple[str, ...]
    published: bool = False
    waves: int = 10  # requests for each of the client's slots
    shortest: tuple[float, float] = (0.8, 0.8)  # lengths of prompts and outputs are uniform from this share on
    latency_ms: float = 0.0  # of network, HTTP and the client, for a request, however many there are
    latency_us: float = 0.0  # likewise, for each token of the prompt
    idle_slots: int = 0  # by which the server runs fewer sequences than the client has open
    most_running: int = 2**31  # sequences that the server runs at once, whatever the client has open
    most_clients: Mapping[str, int] = field(default_factory=dict)  # by system, of published configs
    types: Mapping[str, str] = field(default_factory=lambda: TYPES)
    scripted: Callable[[Row], list[str]] = _nothing  # settings that depend on the row

    def has(self, row: Row) -> bool:
        """Whether a row belongs to it."""
        return row.model in self.models and (row.backend, row.is_published) == (self.backend, self.published)

    def settings(self, row: Row) -> list[str]:
        """What `kvlab run` would take for a row."""
        prompt, output = self.shortest
        return [
            "executor=simulated",
            "executor.timing=silicon",
            f"hardware={row.system}",
            f"executor.tensor_parallel={row.tensor_parallel}",
            f"executor.weights={self.types[row.experts or row.weights]}",
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
            *self.scripted(row),
        ]

    def lacking(self, row: Row) -> str | None:
        """Why a row of it cannot be simulated, in words that count them; None: it can."""
        if (stored := row.experts or row.weights) not in self.types:
            return f"weights in {stored}"
        if row.is_published and row.system == "gb200":
            return "GB200: devices of prefill and of decode, counted together"
        if row.is_speculative:
            return "predicted several tokens at once, and how many were accepted is not published"
        if row.concurrency > self.most_clients.get(row.system, row.concurrency):
            return "more clients than any config has"
        if row.concurrency <= self.idle_slots:
            return "as many slots as stay idle"
        return None


_VARIED = (1.0, 0.95)  # prompts of one length; outputs that vary enough for requests not to stay in step
_BUDGET = "scheduler.max_batched_tokens=8192"
_STATIC, _BLOCK = "framework.fp8_scales=static", "framework.fp8_scales=block"
_AHEAD = "scheduler.ahead=true"  # vLLM's asynchronous scheduling, the overlap schedulers of the other two
_VLLM = ("framework=vllm", "executor.memory_utilization=0.9", _AHEAD)  # the share is that of the scripts
_TRTLLM = ("framework=trtllm", "scheduler.reserve_output=true", _AHEAD)
_SGLANG = (
    "framework=sglang",
    _BLOCK,
    "scheduler.order=prefill_alone",
    "scheduler.reserve_output=true",
    _AHEAD,
    _BUDGET,
)
_8B, _32B, _70B = "model=llama3_1_8b", "model=qwen3_32b", "model=llama3_1_70b"


CAMPAIGNS = (
    Campaign(
        "Llama 3.1 70B, vLLM",
        ("meta-llama/Llama-3.1-70B",),
        "vllm",
        (_70B, *_VLLM, _STATIC, _BUDGET),
        published=True,
        latency_ms=4,
        scripted=llama_70b_vllm,
    ),
    Campaign(
        "Llama 3.1 70B, TensorRT-LLM",
        ("meta-llama/Llama-3.1-70B",),
        "trtllm",
        (_70B, *_TRTLLM, _STATIC, "scheduler.max_batched_tokens=16384", FP8_CACHE),
        published=True,
        latency_ms=12,
        scripted=batch_waiting,
    ),
    Campaign(
        "Qwen3 32B, vLLM 0.12",
        ("Qwen/Qwen3-32B",),
        "vllm",
        (_32B, "framework=vllm_synchronous", _BLOCK, _BUDGET),
        waves=15,
        shortest=_VARIED,
        latency_us=40,
    ),
    Campaign(
        "Qwen3 32B, TensorRT-LLM",
        ("Qwen/Qwen3-32B",),
        "trtllm",
        (_32B, *_TRTLLM, "scheduler.ahead=false", _BLOCK, _BUDGET, FP8_CACHE),
        waves=15,
        shortest=_VARIED,
        latency_us=70,
    ),
    Campaign(
        "Llama 3.1 8B, TensorRT-LLM",
        ("meta-llama/Llama-3.1-8B-Instruct",),
        "trtllm",
        (_8B, *_TRTLLM, _BLOCK, _BUDGET),
        waves=20,
        shortest=_VARIED,
        latency_ms=20,
        idle_slots=1,
    ),
    Campaign(
        "Llama 3.1 8B fp8, SGLang",
        ("meta-llama/Llama-3.1-8B-Instruct",),
        "sglang",
        (_8B, *_SGLANG),
        shortest=_VARIED,
        most_running=488,
        scripted=static_memory,
    ),
    Campaign(
        "Llama 3.1 8B fp8, vLLM 0.12",
        ("nvidia/Llama-3.1-8B-Instruct-FP8",),
        "vllm",
        (_8B, "framework=vllm_synchronous", _STATIC, _BUDGET),
        shortest=_VARIED,
    ),
    Campaign(
        "Qwen3 32B, SGLang",
        ("Qwen/Qwen3-32B",),
        "sglang",
        (_32B, *_SGLANG),
        shortest=(1.0, 1.0),
        scripted=static_memory,
    ),
    Campaign(
        "Qwen3 32B nvfp4, TensorRT-LLM",
        ("nvidia/Qwen3-32B-NVFP4",),
        "trtllm",
        (_32B, *_TRTLLM, _BUDGET, FP8_CACHE),
        shortest=_VARIED,
    ),
    Campaign(
        "gpt-oss 120B, vLLM",
        ("openai/gpt-oss-120b",),
        "vllm",
        ("model=gpt_oss_120b", *_VLLM, _BUDGET),
        published=True,
        latency_ms=4,
        most_clients={"h100_sxm": 64},
        types={"nvfp4": "auto"},
        scripted=gpt_oss_vllm,
    ),
    Campaign(
        "gpt-oss 120B, TensorRT-LLM",
        ("openai/gpt-oss-120b",),
        "trtllm",
        ("model=gpt_oss_120b", *_TRTLLM),
        published=True,
        latency_ms=12,
        types={"nvfp4": "auto"},
        scripted=gpt_oss_trtllm,
    ),
    Campaign(
        "MiniMax M2.5, vLLM",
        ("MiniMaxAI/MiniMax-M2.5",),
        "vllm",
        ("model=minimax_m2", *_VLLM, _BLOCK),
        published=True,
        latency_ms=4,
        types=_AS_STORED,
        scripted=minimax,
    ),
    Campaign(
        "DeepSeek V3 and R1, SGLang",
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"),
        "sglang",
        ("model=deepseek_v3", *_SGLANG),
        published=True,
        types=_AS_STORED,
        scripted=polled,
    ),
    Campaign(
        "DeepSeek V3 and R1, TensorRT-LLM",
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"),
        "trtllm",
        ("model=deepseek_v3", *_TRTLLM, _BLOCK),
        published=True,
        latency_ms=12,
        types=_AS_STORED,
        scripted=deepseek_trtllm,
    ),
    Campaign(
        "Kimi K2.5, vLLM",
        ("moonshotai/Kimi-K2.5",),
        "vllm",
        ("model=kimi_k2_5", *_VLLM, _BLOCK, _BUDGET),
        published=True,
        latency_ms=4,
        types=_AS_STORED,
        scripted=kimi,
    ),
    Campaign(
        "Qwen3 235B A22B, vLLM 0.12",
        ("Qwen/Qwen3-235B-A22B-FP8",),
        "vllm",
        ("model=qwen3_235b_a22b", "framework=vllm_synchronous", _BLOCK, _BUDGET),
        shortest=_VARIED,
        latency_us=40,
        scripted=divided,
    ),
    Campaign(
        "Qwen3 235B A22B, TensorRT-LLM",
        ("Qwen/Qwen3-235B-A22B-FP8",),
        "trtllm",
        ("model=qwen3_235b_a22b", *_TRTLLM, "scheduler.ahead=false", _BLOCK, _BUDGET, FP8_CACHE),
        waves=15,
        shortest=_VARIED,
        latency_ms=140,
        scripted=divided,
    ),
    Campaign(
        "Qwen3 235B A22B, SGLang",
        ("Qwen/Qwen3-235B-A22B-FP8",),
        "sglang",
        ("model=qwen3_235b_a22b", *_SGLANG),
        shortest=_VARIED,
        latency_ms=300,
        scripted=sglang,
    ),
)


def campaign_of(row: Row, among: Sequence[Campaign] = CAMPAIGNS) -> Campaign | None:
    """The campaign that a row belongs to; None: none."""
    return next((campaign for campaign in among if campaign.has(row)), None)
