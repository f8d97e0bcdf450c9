"""What this machine's memory and arithmetic sustain, measured once and kept in the user's cache folder."""

from __future__ import annotations

import json
import math
import timeit
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from kvlab.errors import OutputError
from kvlab.kernels.cpu.cache import cache_folder
from kvlab.kernels.cpu.memory import empty
from kvlab.lab.files import write_text
from kvlab.lab.machine import describe
from kvlab.lab.roofline import MachineRates
from kvlab.models.ops import select_ops
from kvlab.models.ops.torch_ops import TorchOps

_READ_BYTES = 2**29  # more than caches hold
_FILE = "rates.json"
_ROWS = 512
_SHAPES = ((4096, 1024), (1024, 3072), (4096, 4096))  # outputs, inputs: those of decoders, small to large
_ROUNDS = 3
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


def _key(dtype: str) -> str:
    return f"{describe('cpu')}; {torch.get_num_threads()} threads; {dtype}; torch {torch.__version__}"


@torch.inference_mode()
def measure(dtype: str, *, read_bytes: int = _READ_BYTES, rows: int = _ROWS) -> MachineRates:
    """The best of several rounds: memory read in order (a sum over a tensor larger than the caches), and products
    of `rows` rows with weights of several shapes, by kvlab's kernels or PyTorch.
    """
    source = empty((read_bytes // 8,), torch.int64).fill_(1)  # in the pages that weights and KV cache lie in
    bandwidth = read_bytes / _fastest(source.sum)
    del source
    kind: torch.dtype = getattr(torch, dtype)
    ways = {ops.name: ops for ops in (select_ops(kind, "cpu"), TorchOps())}
    rate = 0.0
    for outputs, inputs in _SHAPES:
        weight, x = torch.full((outputs, inputs), 0.01, dtype=kind), torch.ones(rows, inputs, dtype=kind)
        for ops in ways.values():
            linear = ops.linear(weight)
            rate = max(rate, 2 * rows * outputs * inputs / _fastest(partial(linear, x)))
    return MachineRates(bandwidth, rate)


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, after one that warms up."""
    _, second = timeit.repeat(call, number=1, repeat=2)
    rounds = max(_ROUNDS, math.ceil(_ROUNDS_S / second))
    return min(timeit.repeat(call, number=1, repeat=rounds))


def _load(path: Path) -> dict[str, MachineRates]:
    try:
        return {key: MachineRates(*map(float, pair)) for key, pair in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # absent, or cut off
        return {}
