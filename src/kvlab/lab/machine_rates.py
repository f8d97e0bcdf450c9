"""What this machine's memory and arithmetic sustain, measured once and kept in the user's cache folder."""

import ctypes
import json
import math
import os
import timeit
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from kvlab.config.executor import DTYPES, W8A8
from kvlab.engine.threads import resolve_threads
from kvlab.errors import KernelError, OutputError
from kvlab.kernels.cpu.attention import paged_attention
from kvlab.kernels.cpu.cache import cache_folder
from kvlab.kernels.cpu.memory import empty, ways_to_read
from kvlab.kernels.cpu.native import load
from kvlab.kernels.cpu.paths import int8_rate_in_registers, rates_in_registers
from kvlab.lab.files import write_text
from kvlab.lab.machine import CpuWatch, describe, oversubscription
from kvlab.lab.results.roofline import MachineRates
from kvlab.models.ops import select_ops
from kvlab.models.ops.torch_ops import TorchOps

_READ_BYTES, _CONTEXT_BYTES = 2**29, 2**28  # more than caches hold
_FILE = "rates.json"
_ROWS = 512
_SHAPES = ((4096, 1024), (1024, 3072), (4096, 4096))  # outputs, inputs: those of decoders, small to large
_SEQUENCES, _BLOCK = 16, 16  # that decode at once, and tokens of their blocks
_ROUNDS, _CONTEXT_ROUNDS = 3, 8
# What holds a processor to fewer instructions than it has.
_ISA_SETTINGS = ("KVLAB_CPU_ARCH", "KVLAB_CPU_PATHS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
_ROUNDS_S = 0.15  # for one way to multiply one shape, where three rounds do not take longer


def known_rates(dtype: str) -> MachineRates | None:
    """The rates of this processor, number of threads, dtype and version of PyTorch, if they were measured before.
    They are in the folder that `KVLAB_CACHE` names, as kernels are.
    """
    try:
        return _load(cache_folder() / _FILE).get(_key(dtype))
    except OSError:
        return None


def measure_and_keep(dtype: str) -> MachineRates:
    """Measure the rates, about two seconds, and put them where `known_rates` finds them."""
    rates = measure(dtype)
    with suppress(OSError, OutputError):  # without a folder to keep them in, each time costs a measurement
        file = cache_folder() / _FILE
        write_text(file, json.dumps({**_load(file), _key(dtype): rates}, indent=1))
    return rates


def rates_here(dtype: str, threads: int | None) -> MachineRates:
    """The rates for `executor.threads`, measured where they are not known; beside other work they are not kept."""
    before = torch.get_num_threads()
    torch.set_num_threads(resolve_threads(threads))
    try:
        known = known_rates(dtype)
        if known is not None:
            return known
        crowded = oversubscription(torch.get_num_threads(), CpuWatch().busy_cores())
        return measure(dtype) if crowded else measure_and_keep(dtype)
    finally:
        torch.set_num_threads(before)


def _key(dtype: str) -> str:
    threads = torch.get_num_threads()
    held = "".join(f"; {name}={os.environ[name]}" for name in _ISA_SETTINGS if os.environ.get(name))
    return f"{describe('cpu')}; {threads} threads; {dtype} in registers or tiles; torch {torch.__version__}{held}"


@torch.inference_mode()
def measure(dtype: str, *, read_bytes: int = _READ_BYTES, rows: int = _ROWS) -> MachineRates:
    """The best of several rounds. Memory larger than the caches is read in order, by a sum and by a product of one
    row, whichever is faster. Arithmetic is that of numbers in registers, by the fastest instructions. Products of
    `rows` rows with weights of several shapes, by kvlab's kernels or PyTorch, say what is left of it. `dtype` may
    be `int8_w8a8`: products in integers. Raises ConfigError for it where there are no kernels.
    """
    library, threads = _library(), torch.get_num_threads()
    seconds = min(map(_fastest, ways_to_read(read_bytes)))
    kind: torch.dtype = torch.bfloat16 if dtype == W8A8 else getattr(torch, dtype)
    own = select_ops(kind, "cpu", weights=W8A8 if dtype == W8A8 else "auto")
    ways = {ops.name: ops for ops in ((own,) if dtype == W8A8 else (own, TorchOps()))}
    rate = 0.0
    for outputs, inputs in _SHAPES:
        weight, x = torch.full((outputs, inputs), 0.01, dtype=kind), torch.ones(rows, inputs, dtype=kind)
        for ops in ways.values():
            linear = ops.linear(weight)
            rate = max(rate, 2 * rows * outputs * inputs / _fastest(partial(linear, x)))
    if dtype == W8A8 and library:
        return MachineRates(read_bytes / seconds, max(rate, int8_rate_in_registers(library, threads)), rate)
    in_registers = list(rates_in_registers(library, threads).values()) if library else [0.0]
    able = in_registers if kind == torch.bfloat16 else in_registers[:1]  # float32 alone
    return MachineRates(read_bytes / seconds, max(rate, *able), rate)


def measurable() -> tuple[str, ...]:
    """What rates there are of on this machine: products in integers are of kvlab's kernels alone."""
    return (*DTYPES[:2], W8A8) if _library() else DTYPES[:2]


def _library() -> ctypes.CDLL | None:
    try:
        return load()
    except KernelError:
        return None


@torch.inference_mode()
def repeated_share(
    heads: int, kv_heads: int, head_dim: int, dtype: str, *, context: int = 512, num_bytes: int = _CONTEXT_BYTES
) -> float:
    """Time of attending to a context that another sequence of the step has just read, over that of one that comes
    from memory: kvlab's kernel decodes for sequences that share all blocks, and for others that share none.
    """
    kind: torch.dtype = getattr(torch, dtype)
    num_blocks = _SEQUENCES * context // _BLOCK
    shape = (num_blocks, kv_heads, _BLOCK, head_dim)
    rounds = range(math.ceil(num_bytes / (2 * math.prod(shape) * kind.itemsize)))
    layers = [[empty(shape, kind).fill_(0.01) for _ in range(2)] for _ in rounds]
    private = torch.arange(num_blocks, dtype=torch.int32).view(_SEQUENCES, -1)
    tables = (private, private[:1].repeat(_SEQUENCES, 1))
    q = torch.ones(_SEQUENCES, heads, head_dim, dtype=kind)
    lengths = torch.full((_SEQUENCES,), context, dtype=torch.int32)
    starts = torch.arange(_SEQUENCES + 1, dtype=torch.int32)
    # Layers take turns, so that what one call has read is gone from the caches when it is read again. So do both
    # ways, so that what else runs on the machine disturbs both.
    times: list[list[float]] = [[], []]
    for k, v in layers * _CONTEXT_ROUNDS:
        for taken, table in zip(times, tables, strict=True):
            call = partial(paged_attention, q, k, v, table, lengths, starts, scale=1.0)
            taken.append(timeit.timeit(call, number=1))
    own, shared = map(min, times)
    return min(1.0, max(0.0, (shared - own / _SEQUENCES) / (own - own / _SEQUENCES)))


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, after one that warms up."""
    _, second = timeit.repeat(call, number=1, repeat=2)
    return min(timeit.repeat(call, number=1, repeat=max(_ROUNDS, math.ceil(_ROUNDS_S / second))))


def _load(path: Path) -> dict[str, MachineRates]:
    try:
        return {key: MachineRates(*map(float, rates)) for key, rates in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # absent, or cut off
        return {}
