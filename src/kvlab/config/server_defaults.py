"""The settings that a serving framework's server has when it is given none, on a device of so much memory."""

from typing import Any, NamedTuple

from kvlab.config.framework import ASYNCHRONOUS, simulated_version, version_key
from kvlab.config.sglang_memory import static_share, step_tokens
from kvlab.config.values import parse_bytes

_MIB = 2**20
_BLACKWELL = ("b200", "b300", "gb200", "gb300")  # of data centres
_GB10 = "gb10"  # whose memory is that of a large device, and whose arithmetic is not
_WRITES_STATES = {True: (0, 33), False: (0, 32)}  # vLLM's version since which FlashInfer's kernels, and its own, do
_FLASHINFER_GDN = ("h100", "h200", "h20_", *_BLACKWELL, _GB10, "rtx_50", "rtx_pro_6000")  # where the former run


class ServerDefaults(NamedTuple):
    """What a server takes unless it is told otherwise."""

    source: str  # whose defaults they are, in words
    max_batched_tokens: int
    max_batch_size: int
    block_size: int = 16
    memory_utilization: float = 0.9  # share of the device's memory
    order: str = "fcfs"
    ahead: bool = True  # a step is decided while the one before runs
    reserve_prompt: bool = True  # a request is admitted where its whole prompt has room
    reserve_output: bool | None = None  # a request is admitted where all of its answer has room
    conservativeness: float | None = None  # of that answer: this times a share that falls
    chunks_blocks: bool = False  # chunks of prompts are whole blocks
    partial_reuse: bool = False  # prompts find parts of blocks in the prefix cache
    merge_equal: bool = True  # of two blocks of equal content one goes
    admission_reserve: float = 0.0  # none of them keeps a share of the free memory back
    aging_s: float | None = None  # nor lets requests age

    def chunk_unit(self, block_size: int, scheduler: Any) -> int | None:
        """The `scheduler.chunk_unit` with such blocks and other settings of the scheduler, a SchedulerConfig or
        what it is composed of: a block, as far as a step takes one of a prompt; None where chunks end anywhere.
        """
        if not self.chunks_blocks or scheduler.policy == "static" or scheduler.conservativeness is not None:
            return None
        step = int(scheduler.max_batched_tokens)
        return min(block_size, step, int(scheduler.long_prefill_threshold or step))


def defaults_of(
    run: Any,
    *,
    tokens: int | None = None,
    sequences: int | None = None,
    latent: bool = False,
    state_block: int | None = None,
) -> ServerDefaults | None:
    """Those of the server that a run simulates: an EngineConfig, or what it is composed of. None without hardware.
    For the rest see `server_defaults`.
    """
    hardware, framework = getattr(run, "hardware", None), run.framework
    if hardware is None:
        return None
    groups = int(run.executor.attention_data_parallel)
    return server_defaults(
        str(framework.name),
        str(hardware.name),
        str(hardware.memory),
        framework.version,
        groups,
        devices=groups * int(run.executor.tensor_parallel),
        tokens=tokens,
        sequences=sequences,
        latent=latent,
        state_block=state_block,
        graphs=bool(framework.cuda_graphs),
        narrow=str(run.kv.dtype).startswith("fp8"),
    )


def keeps_states_within_steps(run: Any, *, flashinfer: bool) -> bool:
    """Whether the server that a run simulates keeps a state in the middle of a prompt's last step: vLLM with prefix
    caching, whose own kernels of Mamba-2 do, and those of `flashinfer` for the gated delta rule where there are any
    for the device (`_resolve_gdn_prefill_backend`). Raises ConfigError for the version.
    """
    hardware, framework = getattr(run, "hardware", None), run.framework
    if hardware is None or not run.kv.prefix_sharing or not str(framework.name).startswith("vllm"):
        return False
    version = version_key(simulated_version(str(framework.name), framework.version))
    has_kernel = not flashinfer or str(hardware.name).startswith(_FLASHINFER_GDN)
    return version >= _WRITES_STATES[flashinfer] and has_kernel


def state_multiple(run: Any, *, flashinfer: bool) -> int:
    """Tokens of which blocks that hold states are multiples: as many as FlashInfer's kernels compute at once where
    they keep states.
    """
    return 64 if flashinfer and keeps_states_within_steps(run, flashinfer=True) else 16


def server_defaults(
    framework: str,
    device: str,
    memory: str,
    version: str | None = None,
    groups: int = 1,
    *,
    devices: int = 1,
    tokens: int | None = None,
    sequences: int | None = None,
    latent: bool = False,
    state_block: int | None = None,
    graphs: bool = True,
    narrow: bool = False,
) -> ServerDefaults | None:
    """The defaults of a framework (its name in `conf/framework`) on one `device` (its name in `conf/hardware`)
    with so much memory, as 80GiB, or on `groups` of devices that share the sequences, whose limits of a step are
    counted together: vLLM and TensorRT-LLM have a scheduler with these limits for each, SGLang divides them. None
    for this machine, for kvlab itself and for frameworks that are not known here: these have kvlab's own. SGLang's
    share of the memory follows from all its `devices`, from a step's `tokens` and the running `sequences` (None:
    its own), from whether attention is `latent`, and from whether there are CUDA `graphs`; vLLM's blocks of latent
    attention from whether K and V are `narrow` (fp8), and of linear attention from the `state_block` that holds a
    state. Raises ConfigError for a memory that is no size, and for a version that is none.

    Sources: vLLM's `EngineArgs.get_batch_defaults`, as its OpenAI server calls it (an A100 has the smaller limits
    since 0.9, a GB10 since 0.33, devices of 160 GiB the
    largest since 0.28; read in 0.8.5 to 0.33), and `CacheConfig`, whose
    share of the memory grew in 0.21 with CUDA graphs that it counts (vllm-project/vllm 38284); SGLang's
    `server_args.py` (`sglang_memory`; at least 2,048 running requests; pages of one token, which are simulated as
    blocks of 16, and of 64 on B200 and the like, where it takes TensorRT-LLM's kernels), whose overlap scheduler
    runs prompts apart from answers; TensorRT-LLM's `BuildConfig`, `KvCacheConfig` and `CapacitySchedulerPolicy`
    (GUARANTEED_NO_EVICT). Asynchronous scheduling is `SchedulerConfig.async_scheduling` in vLLM, on since 0.14.
    """
    if device == "here":
        return None
    mib = parse_bytes(memory, key="hardware.memory") / _MIB
    if framework.startswith("vllm"):
        newest = simulated_version(framework, version)
        block_size = _latent_block(device, version_key(newest), narrow) if latent else state_block or 16
        return _of_vllm(framework, newest, device, mib / 1_024, groups, block_size)
    if framework == "sglang":
        newest = simulated_version(framework, version)
        key = version_key(newest)
        own = step_tokens(mib, key)
        share = static_share(
            mib,
            key,
            tokens=tokens or own,
            sequences=sequences or 2_048,
            devices=devices,
            groups=groups,
            latent=latent,
            graphs=graphs,
        )
        return ServerDefaults(
            f"SGLang {newest}'s server",
            own,
            2_048,
            64 if device.startswith(_BLACKWELL) and key >= ((0, 5, 4) if latent else (0, 5, 7)) else 16,
            memory_utilization=share,
            order="prefill_alone",
            reserve_output=True,
            conservativeness=1.0,
        )
    if framework == "trtllm":
        limits_of_all = groups * 8_192, groups * 2_048
        source = "TensorRT-LLM's server"
        return ServerDefaults(
            source, *limits_of_all, block_size=32, reserve_output=True, chunks_blocks=True, partial_reuse=True
        )
    return None


def _latent_block(device: str, vllm: tuple[int, ...], narrow: bool) -> int:
    """Tokens of a block, as vLLM's default backend for latent attention has them on a device (`platforms/cuda.py`,
    and from 0.18 the backends' own `get_preferred_block_size`): FlashMLA 64, CUTLASS 128, FlashInfer 64, then 32.
    """
    if device.startswith(("h100", "h200", "h20_")):
        return 64 if vllm < (0, 18) or narrow else 16
    if device.startswith(_BLACKWELL) and vllm >= (0, 10):
        return 128 if vllm < (0, 15) else 64 if vllm < (0, 18) else 32
    return 16


def _of_vllm(framework: str, version: str, device: str, gib: float, groups: int, block_size: int) -> ServerDefaults:
    key = version_key(version)
    if gib >= 160 and key >= (0, 28):
        tokens, sequences = 16_384, 1_024
    elif gib >= 70 and not (("a100" in device.lower() and key >= (0, 9)) or (device == _GB10 and key >= (0, 33))):
        tokens, sequences = 8_192, 1_024
    else:
        tokens, sequences = 2_048, 256
    return ServerDefaults(
        f"vLLM {version}'s server",
        groups * tokens,
        groups * sequences,
        block_size,
        memory_utilization=0.92 if key >= (0, 21) else 0.9,
        merge_equal=False,
        ahead=framework == "vllm" and key >= ASYNCHRONOUS,
        reserve_prompt=key >= (0, 19),
    )
