"""What scripts set that depends on a row: those of InferenceMAX, and the frameworks' own start."""

from __future__ import annotations

from experiments.simulated_vs_silicon.sample import Row

FP8_CACHE = "kv.dtype=fp8_e4m3"


def fused(row: Row, since: tuple[int, int] = (0, 17)) -> list[str]:
    """Whether all-reduces end in norms: from a version of vLLM on by itself, before where a script says so."""
    known = [int(part) for part in row.version.split(".")[:2] if part.isdigit()]
    return [] if len(known) == 2 and tuple(known) >= since else ["framework.fused_allreduce_mib=0"]


def llama_70b_vllm(row: Row) -> list[str]:
    """`enable_fi_allreduce_fusion` and its thresholds, on B200 alone."""
    most = {"b200_sxm": {2: 32, 4: 32, 8: 8}}.get(row.system, {}).get(row.tensor_parallel, 0)
    return [*_h100_cache(row), f"framework.fused_allreduce_mib={most}"]


def batch_waiting(row: Row) -> list[str]:
    """InferenceMAX lets prompts of Llama 3.1 70B wait for 20 steps, or until a step is full to nine tenths."""
    if (row.prompt, row.output) != (1024, 1024) or row.tensor_parallel == 8:
        return []
    return ["scheduler.prefill_wait_steps=20", f"scheduler.prefill_wait_tokens={round(0.9 * 16384)}"]


def static_memory(row: Row) -> list[str]:
    """The share of a device's memory that weights and cache have: SGLang's `_handle_gpu_memory_settings`."""
    device_mib = {"h100_sxm": 81_559, "h200_sxm": 143_771}.get(row.system)
    if device_mib is None:
        return []
    graphs = 256 if row.tensor_parallel < 4 else 512
    reserved = 512 + 1.5 * 8192 + 2 * graphs + 128 * row.tensor_parallel
    return [f"executor.memory_utilization={1 - reserved / device_mib:.3f}"]


def divided(row: Row) -> list[str]:
    """How experts and attention are divided, where they are not as one."""
    data = [f"executor.attention_data_parallel={row.data_parallel}"] if row.data_parallel > 1 else []
    return [*data, f"executor.expert_parallel={row.expert_parallel}"] if row.expert_parallel > 1 else data


def cache(row: Row, *without: str) -> list[str]:
    return [] if row.system in without else [FP8_CACHE]


def _h100_cache(row: Row) -> list[str]:
    """The scripts of H100 had K and V in 16 bits until 23 September 2025. Which of the two was measured is not
    said; on the rows for fitting 16 bits are nearer.
    """
    return cache(row, "h100_sxm")


def polled(row: Row) -> list[str]:
    """`--scheduler-recv-interval`: requests are looked for after so many steps, and wait for half of them."""
    interval = 0 if row.system == "h200_sxm" else 30 if row.concurrency >= 16 else 10
    tokens = 16384 if row.experts == "nvfp4" else 32768
    running = 256 if row.system == "h200_sxm" or row.experts == "nvfp4" else 128
    return [
        f"scheduler.prefill_wait_steps={interval // 2}",
        f"scheduler.max_batched_tokens={tokens}",
        f"scheduler.max_batch_size={min(running, row.concurrency)}",
        *cache(row, "h200_sxm"),
        *divided(row),
    ]


def gpt_oss_vllm(row: Row) -> list[str]:
    """Scripts of B200 ask for all-reduces that end in norms."""
    fusing = [] if row.system == "b200_sxm" else fused(row)
    return [*cache(row, "h100_sxm", "h200_sxm"), *divided(row), *fusing]


def gpt_oss_trtllm(row: Row) -> list[str]:
    return [*cache(row, "h200_sxm"), *divided(row)]


def sglang(row: Row) -> list[str]:
    return [*static_memory(row), *divided(row)]


def minimax(row: Row) -> list[str]:
    """The first scripts of nvfp4 name no budget, and fuse all-reduces."""
    tokens = {"h200_sxm": 32768, "h100_sxm": 8192}.get(row.system, 2 * row.prompt)
    is_first = row.experts == "nvfp4" and row.version.startswith("nightly")
    if is_first:
        tokens = 8192
    return [
        f"scheduler.max_batched_tokens={max(tokens, row.concurrency)}",
        *cache(row, "h100_sxm"),
        *divided(row),
        *([] if is_first else fused(row)),
    ]


def kimi(row: Row) -> list[str]:
    """K and V are in fp8 where the checkpoint says so, which is NVIDIA's in nvfp4."""
    if row.experts == "nvfp4":
        return [FP8_CACHE, *divided(row)]
    return [f"executor.memory_utilization={0.95 if row.system == 'h200_sxm' else 0.97}"]


def deepseek_trtllm(row: Row) -> list[str]:
    tokens = -(-(row.concurrency + row.prompt + 64) // 64) * 64
    if row.experts == "nvfp4":
        tokens = max(tokens, 8192)
    return [f"scheduler.max_batched_tokens={tokens}", FP8_CACHE, *divided(row)]
