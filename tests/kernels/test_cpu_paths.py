"""Which instructions multiply: each gives the right results, and the fastest is taken."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch

from kvlab.errors import KernelError
from kvlab.kernels.cpu import native, paths
from kvlab.kernels.cpu.interface import INT8_PATH, WeightFormat
from kvlab.kernels.cpu.linear import PackedWeight
from kvlab.kernels.cpu.paths import Paths, Rates, choose, choose_for, take
from tests.kernels.grids import folded

HALF_RATE = {"avx512": Rates(60, 170), "avx512-bf16": Rates(70, 95)}
FULL_RATE = {"avx512": Rates(60, 170), "avx512-bf16": Rates(90, 330)}
TILES = {**HALF_RATE, "amx": Rates(50, 1100)}
SLOW_TILES = {**FULL_RATE, "amx": Rates(95, 160)}
MIXED = "avx512-bf16 up to 8 rows, avx512 above"
FORMATS = (WeightFormat.PLAIN, WeightFormat.INT8, WeightFormat.COMPACT)
COUNTS = (1, 2, 3, 4, 7, 8, 9, 12, 13, 16, 19, 24, 25)


@pytest.mark.parametrize(
    ("rates", "setting", "name", "few", "many"),
    [
        (HALF_RATE, None, MIXED, "avx512-bf16", "avx512"),
        (FULL_RATE, None, "avx512-bf16", "avx512-bf16", "avx512-bf16"),
        (TILES, None, "amx", "avx512-bf16", "avx512"),
        (SLOW_TILES, None, "avx512-bf16", "avx512-bf16", "avx512-bf16"),
        (TILES, "avx512-bf16,avx512", MIXED, "avx512-bf16", "avx512"),
        (TILES, "avx512", "avx512", "avx512", "avx512"),
        (TILES, " avx512-bf16", "avx512-bf16", "avx512-bf16", "avx512-bf16"),
        (SLOW_TILES, "amx", "amx", "avx512-bf16", "avx512-bf16"),
        (SLOW_TILES, "amx, avx512", "avx512", "avx512", "avx512"),
        ({"neon": Rates(9, 20), "neon-bf16": Rates(5, 40)}, None, "neon-bf16", "neon-bf16", "neon-bf16"),
    ],
)
def test_the_fastest_is_taken(rates: dict[str, Rates], setting: str | None, name: str, few: str, many: str) -> None:
    """Only what gives the same bits may differ between few rows and many."""
    chosen = choose(rates, setting)
    assert (chosen.name, chosen.few, chosen.many, chosen.tiles) == (name, few, many, name == "amx")


def test_the_reason_is_told() -> None:
    rates = {name: Rates(few * 1e9, many * 1e9) for name, (few, many) in TILES.items()}
    assert choose(rates).reason == "GFLOP/s of a core with 96 rows: amx 1,100, avx512 170, avx512-bf16 95"
    assert choose(rates, "avx512,amx").reason == "KVLAB_CPU_PATHS=avx512,amx"


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(KernelError) as refusal:
        choose(HALF_RATE, "avx512,amx")
    text = "KVLAB_CPU_PATHS=avx512,amx: 'amx' is not there; this library multiplies with avx512, avx512-bf16"
    assert str(refusal.value) == text


def library_of(*names: str) -> ctypes.CDLL:
    """A library that names its paths, and does nothing else."""

    class Library:
        def kvlab_paths(self) -> bytes:
            return " ".join(names).encode()

    return cast(ctypes.CDLL, Library())


class Measured:
    """Counts measurements; each finds other rates."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, library: ctypes.CDLL) -> dict[str, Rates]:
        self.count += 1
        return {name: Rates(1.0, 10.0 * self.count + at) for at, name in enumerate(paths._names(library))}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    measured = Measured()
    monkeypatch.setattr(paths, "measure", measured)
    return measured


BOTH = library_of("avx512", "avx512-bf16")


def test_one_measurement_serves_all_processes(measured: Measured, tmp_path: Path) -> None:
    first = choose_for(BOTH, None, tmp_path / "kept")
    assert choose_for(BOTH, None, tmp_path / "kept") == first
    assert measured.count == 1
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o600


def test_another_processor_is_measured_beside_the_first(
    measured: Measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = choose_for(BOTH, None, tmp_path / "kept")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(paths, "_processor", lambda: "another")
        assert choose_for(BOTH, None, tmp_path / "kept") != first
    assert choose_for(BOTH, None, tmp_path / "kept") == first
    assert measured.count == 2


@pytest.mark.parametrize(
    "broken",
    ["", "{", "[]", '{"%s": {"avx512": [1, 2]}}', '{"%s": 3}', '{"%s": {"a": "b"}}']
    + [f'{{"%s": {{"avx512": [1, 2], "avx512-bf16": [1, {rate}]}}}}' for rate in ("0", "-1", "NaN", "Infinity")],
)
def test_what_is_damaged_is_measured_again(broken: str, measured: Measured, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text(broken.replace("%s", paths._processor()))
    first = choose_for(BOTH, None, tmp_path / "kept")
    assert choose_for(BOTH, None, tmp_path / "kept") == first
    assert measured.count == 1


def test_without_a_folder_each_process_measures(measured: Measured, tmp_path: Path) -> None:
    for _ in range(2):
        choose_for(BOTH, None, tmp_path / "gone" / "kept")
    assert measured.count == 2


def test_where_there_is_no_choice_nothing_is_measured(measured: Measured, tmp_path: Path) -> None:
    one = library_of("avx2")
    assert choose_for(one, None, tmp_path / "kept") == Paths(False, "avx2", "avx2", {})
    with pytest.raises(KernelError, match="this library multiplies with avx2"):
        choose_for(one, "avx512", tmp_path / "kept")
    assert measured.count == 0
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def library() -> Iterator[ctypes.CDLL]:
    """The library, whose paths the test may change."""
    try:
        library = native.load()
    except KernelError:
        pytest.skip("no native kernels")
    yield library
    take(library, native.paths())


def every_choice(library: ctypes.CDLL) -> list[Paths]:
    names = paths._names(library)
    vectors = [name for name in names if name != paths.TILES]
    tiles = (False, True) if paths.TILES in names else (False,)
    return [Paths(taken, few, many, {}) for taken in tiles for few in vectors for many in vectors]


@folded
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (16, 32), (17, 33), (70, 96), (1000, 64), (64, 1023), (300, 2080)]
)
def test_each_gives_the_product(outputs: int, inputs: int, format: WeightFormat, library: ctypes.CDLL) -> None:
    """Up to one rounding to bfloat16; all but tiles the same to the last bit, so that a row depends on no other."""
    weight, x = torch.randn(outputs, inputs).bfloat16(), torch.randn(50, inputs).bfloat16()
    packed = PackedWeight(weight, format)
    scale = weight.double().abs().amax(dim=1, keepdim=True) / 127
    int8 = format is WeightFormat.INT8
    exact = x.double() @ (torch.round(weight.double() / scale) * scale if int8 else weight.double()).T
    size = exact.abs().max().item()
    rows = [row for count in COUNTS for row in range(count)]
    firsts: dict[bool, torch.Tensor] = {}
    for choice in every_choice(library):
        take(library, choice)
        together = packed.multiply(x)
        first = firsts.setdefault(choice.tiles and inputs % 32 == 0, together)
        torch.testing.assert_close(together.double(), exact, atol=(2e-2 if int8 else 4e-3) * size, rtol=4e-3)
        if "neon" not in choice.few:
            assert torch.equal(together, first)
            assert torch.equal(torch.cat([packed.multiply(x[:count]) for count in COUNTS]), together[rows])


def test_a_measurement_is_of_this_world(library: ctypes.CDLL) -> None:
    found = paths.measure(library)
    assert list(found) == paths._names(library)
    assert all(1e7 < rate < 1e14 for rates in found.values() for rate in rates)


def test_operations_in_registers_are_counted(library: ctypes.CDLL) -> None:
    for index in (*range(len(paths._names(library))), INT8_PATH):
        once = library.kvlab_multiply_in_registers(index, 10, 1)
        assert once > 0
        assert library.kvlab_multiply_in_registers(index, 20, 1) == 2 * once
        assert library.kvlab_multiply_in_registers(index, 10, 2) == 2 * once
    if paths.TILES in (names := paths._names(library)):  # which hold twice as many numbers in int8
        counts = [library.kvlab_multiply_in_registers(at, 10, 1) for at in (names.index(paths.TILES), INT8_PATH)]
        assert counts[1] == 2 * counts[0]
