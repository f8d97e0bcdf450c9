"""What scripts set that depends on a row: those of InferenceMAX, and the frameworks' own start."""

from __future__ import annotations

from experiments.simulated_vs_silicon.sample import Row

FP8_CACHE = "kv.dtype=fp8_e4m3"
_LAUNCHED = "framework.prompts_us=134000"  # of DeepSeek's 61 layers, 2.2 ms each, where no graph holds them
_WORKING = 0.012  # share of a B200 that a step's working memory takes, which TensorRT-LLM counts apart
_DEEPSEEK_BYTES = {"fp8": 6.8e11, "nvfp4": 3.9e11}  # of all matrices and scales


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
    """`--scheduler-recv-interval`: requests are looked for after so many steps, and wait for half of them. Four
    devices, of which weights in fp8 leave little, have `--mem-fraction-static 0.95`, others in fp8 0.82.
    """
    four = row.devices == 4 and row.experts != "nvfp4"
    interval = 0 if row.system == "h200_sxm" else 30 if row.concurrency >= 16 and not four else 10
    tokens = 16384 if row.experts == "nvfp4" else 8192 if four else 32768
    running = 256 if row.system == "h200_sxm" or row.experts == "nvfp4" else 32 if four else 128
    return [
        f"scheduler.prefill_wait_steps={interval // 2}",
        f"scheduler.max_batched_tokens={tokens}",
        f"scheduler.max_batch_size={min(running, row.concurrency)}",
        *([] if row.experts == "nvfp4" else [f"executor.memory_utilization={0.95 if four else 0.82}"]),
        _LAUNCHED,
        *cache(row, "h200_sxm"),
        *divided(row),
    ]


def gpt_oss_vllm(row: Row) -> list[str]:
    """Scripts of B200 ask for all-reduces that end in norms, and for experts' activations in fp8."""
    if row.system != "b200_sxm":
        return [*divided(row), *fused(row)]
    return [FP8_CACHE, *divided(row), "framework.expert_kernels=trtllm_gen"]


def gpt_oss_trtllm(row: Row) -> list[str]:
    """`stream_interval: 20` and `num_postprocess_workers: 4`, which no other script has: what the host does for
    each sequence is done in one step of 20.
    """
    return [
        f"scheduler.max_batched_tokens={20_000 * row.data_parallel}",
        "framework.sequence_us=1.25",
        *cache(row, "h200_sxm"),
        *divided(row),
        *_balanced(row, 50),
    ]


def _balanced(row: Row, iterations: int) -> list[str]:
    """With attention's `enable_balance` prompts wait until every group has one, or for the rest of so many
    iterations, which are counted from the last time: half of them.
    """
    return [f"scheduler.prefill_wait_steps={iterations // 2}"] if row.data_parallel > 1 else []


def sglang(row: Row) -> list[str]:
    return [*static_memory(row), *divided(row)]


def minimax(row: Row) -> list[str]:
    """Scripts changed with the images: until April 2026 they name neither budget nor type of K and V, and those of
    B200 and of 8 H200 divide experts always; that of B200 has `VLLM_USE_FLASHINFER_MOE_FP8=0` and
    `VLLM_MOE_USE_DEEP_GEMM=0`, which leaves Triton's kernels. vLLM 0.16 takes FlashInfer's of CUTLASS on a Hopper
    (vllm-project/vllm 34249). The first of nvfp4 name no budget, and fuse all-reduces.
    """
    if row.measured < "2026-04" and row.experts != "nvfp4":
        always = row.system == "b200_sxm" or row.tensor_parallel == 8
        experts = [f"executor.expert_parallel={row.devices}"] if always else divided(row)
        share = 0.9 if row.system == "h100_sxm" else 0.95
        if row.system == "b200_sxm":
            experts.append("framework.expert_kernels=triton")
        elif row.version == "0.16.0":
            experts.append("framework.expert_kernels=cutlass")
        return ["scheduler.max_batched_tokens=8192", f"executor.memory_utilization={share}", *experts, *fused(row)]
    is_first = row.experts == "nvfp4" and row.version.startswith("nightly")
    tokens = 8192 if is_first else 2 * row.prompt
    return [
        f"scheduler.max_batched_tokens={max(tokens, row.concurrency) * row.data_parallel}",
        FP8_CACHE,
        *divided(row),
        *([] if is_first else fused(row)),
    ]


def kimi(row: Row) -> list[str]:
    """Its scripts divide matrices alone, whatever the config says of experts. K and V are in fp8 where the
    checkpoint says so, which is NVIDIA's in nvfp4.
    """
    if row.experts == "nvfp4":
        return [FP8_CACHE]
    return [f"executor.memory_utilization={0.95 if row.system == 'h200_sxm' else 0.97}"]


def deepseek_trtllm(row: Row) -> list[str]:
    """K and V have a share of what weights and working memory leave. Experts were DeepGEMM's in fp8 before 2026,
    and are so, or CUTLASS's, where sequences are divided; graphs hold prompts for many clients in fp8 since.
    """
    tokens, is_recent = -(-(row.concurrency + row.prompt + 64) // 64) * 64, row.measured > "2026"
    if is_recent:
        tokens = max(tokens, 8192)
    is_fp8 = row.experts != "nvfp4"
    many = 128 if row.output == 8192 else 64
    in_graphs = is_recent and row.system == "b200_sxm" and is_fp8 and row.concurrency >= many
    waiting = (
        []
        if not in_graphs or row.prompt != row.output
        else ["scheduler.prefill_wait_steps=40", f"scheduler.prefill_wait_tokens={round(0.8 * tokens)}"]
    )
    share = 0.75 if row.system == "h200_sxm" or (row.devices, row.prompt) == (4, 8192) else 0.8
    memory = {"h200_sxm": 1.5e11}.get(row.system, 1.918e11)
    taken = min(0.98, _DEEPSEEK_BYTES[row.experts] / row.devices / memory + _WORKING)
    tables = row.data_parallel > 1 or (is_fp8 and not is_recent)
    return [
        f"scheduler.max_batched_tokens={tokens * row.data_parallel}",  # each group has so many
        f"executor.memory_utilization={share + (1 - share) * taken:.3f}",
        FP8_CACHE,
        *divided(row),
        *(_balanced(row, 60) or waiting),
        *([] if in_graphs else [_LAUNCHED]),
        *(["framework.expert_kernels=tables"] if tables else []),
    ]
