"""What a framework counts at its start beside the weights, and takes from the cache.

TensorRT-LLM runs its largest step of prompts, which samples next to nothing, and gives the cache a share of what
that leaves (`free_gpu_memory_fraction`; `KvCacheCreator` of its PyTorch backend).

SGLang counts nothing: its share of the memory leaves steps and graphs what they need (`config/sglang_memory.py`).
It is a share of what is free before the weights are loaded.

vLLM runs its largest step once and samples a full batch before it sizes the cache (its worker's
`determine_available_memory`). Read in the sources of 0.9 to 0.12, 0.16, 0.17, 0.19 to 0.24 and 0.28 to 0.33:

    sampling    until 0.16 all logits are sorted: 38 bytes for each. From 0.17 a kernel finds top-k and top-p:
                logits, the same in float32, probabilities and random numbers are 14 bytes, and its programs keep
                rows of their own. FlashInfer's sampler takes 14, too (logits, float32, what top-k leaves of them,
                probabilities) and no rows: the default from 0.21, and where it is installed until 0.11.0, as in
                vLLM's Docker images. Model runner V2 (dense models from 0.28, all from 0.29) samples without top-k:
                its logits alone, 2 bytes. From 0.33 it samples once more with all that requests may ask for: 14
                bytes by FlashInfer, without it logits and float32, 6 bytes, and the rows of the kernel
    counts      V2 keeps how often each sequence has each token, for penalties, and a bit for those of its prompt
    compiling   from 0.16 Inductor times combined kernels on example inputs, the embedding's table among them. A
                start that finds its kernels compiled (a warm cache) does not, and gives those bytes to the cache
    graphs      from 0.21 an estimate of the CUDA graphs is kept free: one segment of PyTorch's allocator for each
                graph; not by V2 as it was in 0.28

With enforce_eager nothing is compiled and there are no graphs (framework.cuda_graphs=false).
"""

from dataclasses import dataclass

from kvlab.config import FrameworkConfig, HardwareConfig

_MIB = 2**20
_SMALL_TENSOR, _SMALL_SEGMENT, _LARGE_TENSOR, _LARGE_SEGMENT = _MIB, 2 * _MIB, 10 * _MIB, 20 * _MIB
FLASHINFER_BYTES = 14  # of each logit, while its sampler has a full batch
_MOST_CAPTURED = 512  # tokens of the largest graph
# What is in use on a device when SGLang begins to load: CUDA's context, which grows with the device, and between
# devices with links of their own what collectives keep (experiments/planner_vs_sglang).
_CONTEXT, _CONTEXT_SHARE, _COLLECTIVES = 384 * _MIB, 0.0035, 1_200 * _MIB


@dataclass(frozen=True)
class Startup:
    """What a start counts. The default is that of vLLM until 0.15, and of every framework but SGLang
    and TensorRT-LLM."""

    logit_bytes: int = 38  # of each logit, while a full batch is sampled
    scratch_rows: int = 0  # most rows of float32 logits that kernels keep
    compiles: bool = False  # whether the embedding's table is there once more
    graphs: bool = False  # whether CUDA graphs are counted
    counts: bool = False  # whether each sequence's tokens are, on the device
    unsure: bool = False  # whether it depends on how vLLM was installed what samples, and nobody said it
    profiled: bool = True  # whether the largest step is run, and its memory taken from the share
    of_the_rest: bool = False  # whether the share is of what weights and steps leave, and the cache's alone

    def shared_bytes(self, usable: int, devices: int, *, linked: bool) -> int:
        """What the share is of: of a device with so many usable bytes, one of `devices` with links of their own or
        over those of the host.
        """
        if self.profiled:
            return usable
        return usable - _CONTEXT - round(_CONTEXT_SHARE * usable) - (_COLLECTIVES if devices > 1 and linked else 0)

    @property
    def otherwise(self) -> str:
        """What a logit takes if vLLM was installed otherwise, in words; empty where that is known."""
        if not self.unsure:
            return ""
        return (
            f" ({FLASHINFER_BYTES} where FlashInfer is installed, as in vLLM's Docker images: "
            "framework.flashinfer_sampler=true)"
        )


OTHERS = Startup()
_NOT_AS_VLLM = {
    "sglang": Startup(logit_bytes=FLASHINFER_BYTES, profiled=False),
    "trtllm": Startup(logit_bytes=0, of_the_rest=True),
}


def startup(framework: FrameworkConfig, hardware: HardwareConfig | None = None) -> Startup:
    """Of the framework's version, the newest known one unless set. Raises ConfigError for what is no version."""
    version = framework.vllm_key
    if framework.tables != "vllm" or version is None:
        return _NOT_AS_VLLM.get(framework.name, OTHERS)
    has_flashinfer = hardware is None or hardware.cuda
    flashinfer = framework.flashinfer_sampler if has_flashinfer else False
    if version < (0, 28):
        unsure = version < (0, 11, 1) and flashinfer is None
        if flashinfer is None:
            flashinfer = version >= (0, 21)
        sorts = version < (0, 17)
        return Startup(
            logit_bytes=38 if sorts and not flashinfer else FLASHINFER_BYTES,  # Triton's takes as many
            scratch_rows=0 if sorts or flashinfer else 128,
            compiles=version >= (0, 16) and framework.cuda_graphs,
            graphs=version >= (0, 21) and framework.cuda_graphs,
            unsure=unsure,
        )
    greedy, flashinfer = version < (0, 33), flashinfer is not False
    return Startup(
        logit_bytes=2 if greedy else FLASHINFER_BYTES if flashinfer else 6,
        scratch_rows=0 if greedy or flashinfer else 128,
        compiles=framework.cuda_graphs,
        graphs=version >= (0, 29) and framework.cuda_graphs,
        counts=True,
    )


def graph_bytes(max_batch_size: int, max_batched_tokens: int, row_bytes: int) -> int:
    """What is kept free for CUDA graphs of steps whose tokens have `row_bytes` of hidden state each: those with
    decodes alone have up to `max_batch_size` tokens, all others up to twice that.
    """
    largest = min(2 * max_batch_size, _MOST_CAPTURED, max_batched_tokens)
    sizes = [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if size <= largest]
    count = len(sizes) + sum(1 for size in sizes if size <= max_batch_size)
    tensor = (sizes[-1] if sizes else 0) * row_bytes
    if tensor <= _SMALL_TENSOR:
        segment = _SMALL_SEGMENT
    else:
        segment = _LARGE_SEGMENT if tensor < _LARGE_TENSOR else -(-tensor // _SMALL_SEGMENT) * _SMALL_SEGMENT
    return int(count * segment)
