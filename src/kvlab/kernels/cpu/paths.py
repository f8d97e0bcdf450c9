"""Which instructions multiply: those that are fastest on this processor, as measured once and kept.

A library may have several: tiles (`amx`), an instruction for pairs of bfloat16 (`avx512-bf16`, `neon-bf16`) and
float32 (`avx512`, `avx2`). The processor's flags do not say which is fastest: on Zen 4 `vdpbf16ps` does twice the
arithmetic of a float32 `vfmadd`, on Intel's Xeons with AMX half of it.

On x86, pairs and float32 give the same bits. Tiles round differently, and so do NEON's pairs: they multiply any
number of rows or none, so that a row's result depends on no other row in its batch.
"""

import ctypes
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from kvlab.errors import KernelError
from kvlab.kernels.cpu.cache import building
from kvlab.kernels.cpu.interface import FEW_ROWS, INT8_PATH, LinearWeight, WeightFormat

SETTING = "KVLAB_CPU_PATHS"
TILES = "amx"
_SIDE = 512  # outputs and inputs of the weight that is multiplied: it stays in the second-level cache
_MANY_ROWS = 96
_ROUNDS = 7  # of which the fastest counts
_REGISTERS_S = 5e-3  # much longer than threads take to begin
# Lines of /proc/cpuinfo that say which processor it is.
_PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU variant", "CPU part")


class Rates(NamedTuple):
    """FLOP/s of one core in products whose weights lie in its caches."""

    few: float  # with FEW_ROWS / 2 rows
    many: float  # with 96


class Paths(NamedTuple):
    """What multiplies. `tiles`: whether tiles take what has their shape; `few` and `many` are the instructions for
    everything else, up to FEW_ROWS rows and above.
    """

    tiles: bool
    few: str
    many: str
    rates: Mapping[str, Rates]  # of each that the library has; empty where it has one
    setting: str | None = None  # KVLAB_CPU_PATHS, if it left less to choose from

    @property
    def name(self) -> str:
        """For tags: `amx`, or `avx512-bf16 up to 8 rows, avx512 above`."""
        if self.tiles:
            return TILES
        return self.few if self.few == self.many else f"{self.few} up to {FEW_ROWS} rows, {self.many} above"

    @property
    def reason(self) -> str:
        """Why these: the rates that decided, the best first."""
        if self.setting:
            return f"{SETTING}={self.setting}"
        ranked = sorted(self.rates.items(), key=lambda item: -item[1].many)
        rates = ", ".join(f"{name} {rate.many / 1e9:,.0f}" for name, rate in ranked)
        return f"GFLOP/s of a core with {_MANY_ROWS} rows: {rates}"


def choose(rates: Mapping[str, Rates], setting: str | None = None) -> Paths:
    """The fastest of all, or of those that `setting` (KVLAB_CPU_PATHS) names. What rounds differently from the
    others is taken if it is the fastest with many rows: with few, memory is the limit. What has not the shape of
    tiles is left to the others. Raises KernelError for a setting that names what the library has not.
    """
    names = [name.strip() for name in setting.split(",")] if setting else list(rates)
    for name in names:
        if name not in rates:
            text = f"{name!r} is not there; this library multiplies with {', '.join(rates)}"
            raise KernelError(f"{SETTING}={setting}: {text}")
    vectors = [name for name in names if name != TILES]
    able = vectors or [name for name in rates if name != TILES]
    many = max(able, key=lambda name: rates[name].many)
    few = many if many.startswith("neon") else max(able, key=lambda name: rates[name].few)
    tiles = TILES in names and (not vectors or rates[TILES].many > rates[many].many)
    return Paths(tiles, few, many, rates, setting)


def take(library: ctypes.CDLL, paths: Paths) -> None:
    """Have the library's products multiply so."""
    names = _names(library)
    library.kvlab_choose_paths(paths.tiles, *(names.index(name) > 0 for name in (paths.few, paths.many)))


def choose_for(library: ctypes.CDLL, setting: str | None, kept: Path) -> Paths:
    """The paths of a library (`choose`), by the rates in the file `kept`. This processor's are measured and put
    there if they are missing.
    """
    (first, *others) = _names(library)
    if others:
        return choose(_rates(library, kept), setting)
    choose({first: Rates(0.0, 0.0)}, setting)
    return Paths(False, first, first, {})


def _names(library: ctypes.CDLL) -> list[str]:
    """float32, pairs, tiles; as far as the library and this process have them."""
    names: bytes = library.kvlab_paths()
    return names.decode().split()


def _rates(library: ctypes.CDLL, kept: Path) -> dict[str, Rates]:
    """Of each path. Processes that start together share one measurement, so that they choose the same."""
    names, processor = _names(library), _processor()
    if known := _read(kept, names).get(processor):
        return known
    try:
        with building(kept.parent):
            everything = _read(kept, names)
            if processor not in everything:  # or another process measured meanwhile
                everything[processor] = measure(library)
                with suppress(OSError):  # without a place to keep it, each process measures
                    _write(kept, everything)
            return everything[processor]
    except OSError:
        return measure(library)


def measure(library: ctypes.CDLL) -> dict[str, Rates]:
    """The rates of each path on one core, in some milliseconds. Paths take turns, so that other work on the machine
    disturbs all of them. Leaves the library with the paths of the last one.
    """
    names, row_counts = _names(library), (FEW_ROWS // 2, _MANY_ROWS)
    weight = torch.full((_SIDE, _SIDE), 0.01, dtype=torch.bfloat16)
    packed = torch.empty(library.kvlab_packed_linear_bytes(_SIDE, _SIDE, WeightFormat.PLAIN, 2), dtype=torch.uint8)
    library.kvlab_pack_linear(weight.data_ptr(), _SIDE, _SIDE, packed.data_ptr(), 2, 1)
    plain = LinearWeight(packed.data_ptr(), None, None, _SIDE, _SIDE, WeightFormat.PLAIN, 2)
    x, out = (torch.ones(_MANY_ROWS, _SIDE, dtype=torch.bfloat16) for _ in range(2))
    fastest = {name: [math.inf, math.inf] for name in names}
    for name in names * _ROUNDS:
        take(library, Paths(name == TILES, *(2 * (name if name != TILES else names[0],)), {}))
        for column, rows in enumerate(row_counts):
            arguments = x.data_ptr(), _SIDE, rows, ctypes.addressof(plain), out.data_ptr(), False, 1
            start = time.perf_counter()
            library.kvlab_linear(*arguments)
            fastest[name][column] = min(fastest[name][column], time.perf_counter() - start)
    work = [2 * rows * _SIDE * _SIDE for rows in row_counts]
    return {name: Rates(work[0] / few, work[1] / many) for name, (few, many) in fastest.items()}


def rates_in_registers(library: ctypes.CDLL, threads: int) -> dict[str, float]:
    """FLOP/s of each path on numbers in registers, on all threads together. float32 is the first."""
    return {name: _rate_in_registers(library, index, threads) for index, name in enumerate(_names(library))}


def int8_rate_in_registers(library: ctypes.CDLL, threads: int) -> float:
    """Operations/s of products in integers, in tiles where there are any, as `rates_in_registers`."""
    return _rate_in_registers(library, INT8_PATH, threads)


def _rate_in_registers(library: ctypes.CDLL, index: int, threads: int) -> float:
    def seconds_of(rounds: int) -> tuple[float, int]:
        start = time.perf_counter()
        operations: int = library.kvlab_multiply_in_registers(index, rounds, threads)
        return time.perf_counter() - start, operations

    rounds, seconds = 1000, 0.0
    while seconds < _REGISTERS_S:
        rounds *= 2
        seconds, operations = seconds_of(rounds)
    return operations / min(seconds, *(seconds_of(rounds)[0] for _ in range(_ROUNDS)))


def _processor() -> str:
    """Which processor this is, as far as the system says."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        fields = (line.split(":", 1) for line in first if ":" in line)
        known = {name.strip(): value.strip() for name, value in fields}
        return ", ".join(f"{name} {known[name]}" for name in _PROCESSOR if name in known)
    return ""


def _read(file: Path, names: list[str]) -> dict[str, dict[str, Rates]]:
    """The rates of each processor; those that are damaged, or of other paths, are left out."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        everything = {
            processor: {name: Rates(float(few), float(many)) for name, (few, many) in rates.items()}
            for processor, rates in kept.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):  # absent, or cut off
        return {}
    return {
        processor: rates
        for processor, rates in everything.items()
        if list(rates) == names and all(0 < rate < math.inf for pair in rates.values() for rate in pair)
    }


def _write(file: Path, everything: dict[str, dict[str, Rates]]) -> None:
    """Complete or not at all."""
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(everything, indent=1))
    part.chmod(0o600)
    part.replace(file)
