"""The machine's rates: measured once, then read."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import psutil
import pytest

from kvlab.cli import resolvers
from kvlab.config.values import parse_bytes
from kvlab.engine.build import plan_engine
from kvlab.errors import ConfigError
from kvlab.lab import machine_rates
from kvlab.lab.machine_rates import known_rates, measure, measure_and_keep
from kvlab.lab.results.roofline import MachineRates
from tests.support.plans import compose_run


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in place of the time it takes; each measurement finds a machine twice as fast."""
    asked: list[str] = []

    def fake(dtype: str) -> MachineRates:
        asked.append(dtype)
        return MachineRates(1e9 * 2 ** len(asked), 2e11, 1e11)

    monkeypatch.setattr(machine_rates, "measure", fake)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return asked


def test_what_was_measured_is_known(measured: list[str]) -> None:
    assert known_rates("bfloat16") is None
    first, other = measure_and_keep("bfloat16"), measure_and_keep("float32")
    assert (known_rates("bfloat16"), known_rates("float32")) == (first, other)
    assert first != other


def test_a_later_measurement_replaces_an_earlier(measured: list[str]) -> None:
    measure_and_keep("float32")
    assert measure_and_keep("float32") == known_rates("float32") == MachineRates(4e9, 2e11, 1e11)


def test_another_number_of_threads_is_another_machine(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measure_and_keep("float32")
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    assert known_rates("float32") is None


def test_a_processor_held_to_fewer_instructions_is_another_machine(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_and_keep("bfloat16")
    monkeypatch.setenv("KVLAB_CPU_ARCH", "x86-64-v2")
    assert known_rates("bfloat16") is None


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', '["a"]', '{"a": [1]}'])
def test_a_spoiled_cache_is_replaced(measured: list[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "rates.json").write_text(text)
    assert known_rates("float32") is None
    assert measure_and_keep("float32") == known_rates("float32") == MachineRates(2e9, 2e11, 1e11)


def test_without_a_folder_to_write_to_it_still_measures(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "file"))
    assert measure_and_keep("float32") == MachineRates(2e9, 2e11, 1e11)


def test_a_folder_that_others_may_write_to_is_left_alone(measured: list[str], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert measure_and_keep("float32") == MachineRates(2e9, 2e11, 1e11)
    assert known_rates("float32") is None
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8_w8a8"])
def test_a_measurement_is_of_this_world(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_rates, "_SHAPES", ((64, 64),))
    monkeypatch.setattr(machine_rates, "_ROUNDS_S", 0.0)
    found = measure(dtype, read_bytes=2**16, rows=8)
    assert 1e6 < found.read_bytes_per_s < 1e13
    assert 1e6 < found.product_flops_per_s <= found.flops_per_s < 1e15


def test_no_product_is_faster_than_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 by the fastest instructions there are, float32 by those of float32."""
    monkeypatch.setattr(machine_rates, "_SHAPES", ((64, 64),))
    monkeypatch.setattr(machine_rates, "_ROUNDS_S", 0.0)
    monkeypatch.setattr(machine_rates, "rates_in_registers", lambda *_: {"avx512": 1e15, "amx": 1e16})
    if machine_rates._library() is not None:
        found = [measure(dtype, read_bytes=2**16, rows=8).flops_per_s for dtype in ("bfloat16", "float32")]
        assert found == [1e16, 1e15]
    monkeypatch.setattr(machine_rates, "_library", lambda: None)
    assert measure("bfloat16", read_bytes=2**16, rows=8).flops_per_s < 1e15  # without kernels: of products


def test_the_faster_way_of_reading_is_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    if machine_rates._library() is None:
        pytest.skip("no native kernels")
    monkeypatch.setattr(machine_rates, "_SHAPES", ())
    monkeypatch.setattr(machine_rates, "_fastest", lambda call: 0.5 if isinstance(call, partial) else 2.0)
    assert measure("float32", read_bytes=2**16).read_bytes_per_s == 2**17


def test_this_machine_is_a_device_to_simulate(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolvers, "_rates", cache(machine_rates.rates_here))
    chosen = ("executor=simulated", "hardware=here", "model=qwen3_tiny", "executor.threads=1")
    other = compose_run(*chosen, "executor.timing=fitted").hardware
    assert other is not None
    assert (other.bandwidth_gb_s, other.tflops, measured) == (0, {}, [])
    here = compose_run(*chosen, "executor.dtype=float32").hardware
    assert here is not None
    assert parse_bytes(here.memory, key="") == psutil.virtual_memory().total
    assert (here.bandwidth_gb_s, here.tflops, measured) == (2.0, {"float32": 0.1}, ["float32"])
    with pytest.raises(ConfigError, match=r"hardware\.bandwidth_gb_s=0.0: timing=roofline needs the bandwidth"):
        plan_engine(compose_run(*chosen, "executor.dtype=float32", "hardware.bandwidth_gb_s=0"))


def test_a_context_that_was_read_before_takes_less_time_or_as_much() -> None:
    assert 0 <= machine_rates.repeated_share(4, 2, 32, "float32", context=64, num_bytes=2**20) <= 1
