"""Which kernels a run takes, and that it says so: on the screen, in its summary, as tags."""

from __future__ import annotations

import io
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from kvlab.errors import ConfigError, KernelError
from kvlab.kernels.cpu import native
from kvlab.kernels.cpu.native import instruction_set, paths
from kvlab.lab.run.execute import execute
from kvlab.lab.terminal import Terminal
from kvlab.models.ops.cpu_ops import CpuOps
from tests.kernels.conftest import build_for
from tests.support.plans import compose_run
from tests.support.runs import context_of
from tests.support.tracking import empty_store

TINY = (
    "model=qwen3_tiny",
    "figures=false",
    "executor=cpu",
    "executor.threads=1",
    "kv.memory=1MiB",
    "model.max_seq_len=256",
    "workload.num_requests=2",
    "workload.prompt_len={min: 5, max: 20}",
    "workload.output_len={min: 2, max: 4}",
)
NOT_THERE = "CXX=/nonexistent: there is no such compiler; unset it, or name one that is installed"

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
needs_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="not an x86 machine")


def check_path(folder: Path, attention: str, kernels: str, *overrides: str, reason: str = "") -> None:
    """Run, and look wherever the path should be told."""
    folder.mkdir(exist_ok=True)
    (folder / "runs.db").write_bytes(empty_store())
    store, console = f"sqlite:///{folder}/runs.db", Terminal(width=1000, record=True, file=io.StringIO())
    config = compose_run(*TINY, f"tracking.uri={store}", *overrides)
    assert execute(context_of(config, folder, console)).metrics["requests/completed"] == 2
    said = console.export_text()
    assert f"attention: {attention}, other kernels: {kernels}{reason}; 2 requests" in said
    assert ", 1 thread (executor.threads)" in said
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["attention"], summary["kernels"]) == (attention, kernels)
    client = MlflowClient(store)
    (run,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert (run.data.tags["resolved.attention"], run.data.tags["resolved.kernels"]) == (attention, kernels)


def test_without_a_compiler_pytorch_computes_and_the_reason_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))  # what was tried before is not asked again
    with caplog.at_level(logging.WARNING):
        check_path(tmp_path / "run", "sdpa", "torch")
    assert caplog.messages.count(f"native CPU kernels are off: {NOT_THERE}") == 1


def test_without_kernels_pytorch_computes(tmp_path: Path) -> None:
    check_path(tmp_path / "run", "sdpa", "torch", "executor.kernels=false")


@pytest.mark.slow
@needs_compiler
@needs_x86
@pytest.mark.parametrize(("architecture", "name"), [("x86-64-v3", "avx2"), ("x86-64", "portable")])
def test_without_avx_512_other_instructions_do(
    architecture: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_for(architecture, monkeypatch)  # as tests of kernels do: one library for both
    check_path(tmp_path / "run", "cpu", f"native ({name})")


@needs_compiler
def test_this_machines_instructions_are_named(tmp_path: Path) -> None:
    check_path(
        tmp_path / "run", "cpu", f"native ({instruction_set()})", "executor.dtype=float32"
    )  # PyTorch multiplies
    flags = native._cpu().split()
    if "avx512_bf16" in flags and "KVLAB_CPU_ARCH" not in os.environ:
        assert instruction_set().startswith("avx512-bf16")


@needs_compiler
def test_what_multiplies_is_told_with_the_rates_that_decided(tmp_path: Path) -> None:
    chosen = paths()
    if not chosen.rates:
        pytest.skip("this processor has one way to multiply")
    kernels = f"native ({instruction_set()}; products in {chosen.name})"
    rates = sorted(((rate.many, name) for name, rate in chosen.rates.items()), reverse=True)
    reason = ", ".join(f"{name} {rate / 1e9:,.0f}" for rate, name in rates)
    reason = f" (GFLOP/s of a core with 96 rows: {reason})"
    check_path(tmp_path / "run", "cpu", kernels, reason=reason)


@needs_compiler
def test_a_way_to_multiply_that_was_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    if not paths().rates:
        pytest.skip("this processor has one way to multiply")
    slowest = min(paths().rates, key=lambda name: paths().rates[name].many)
    monkeypatch.setenv("KVLAB_CPU_PATHS", slowest)
    try:
        ops = CpuOps()
    finally:
        monkeypatch.undo()
        native._attempt.cache_clear()  # the library is one, and has to be told again
        native.load()
    assert ops.name == f"native ({instruction_set()}; products in {slowest})"
    assert ops.reason == f"KVLAB_CPU_PATHS={slowest}"


@pytest.mark.parametrize(
    ("built_for", "flags", "advice"),
    [
        ("avx512-bf16", "sse2 avx2 avx512f avx512dq", "x86-64-v3"),
        ("avx512-bf16, amx", "sse2 avx2", "x86-64-v3"),
        ("avx512", "sse2 avx2 avx512f", "x86-64-v3"),
        ("avx2", "sse2", "x86-64"),
        ("avx512-vnni", "sse2 avx2 avx512dq", "x86-64-v3"),
        ("avx-vnni", "sse2 avx2", "x86-64-v3"),
    ],
)
def test_instructions_that_the_processor_has_not_are_refused(
    built_for: str, flags: str, advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Used, they would end the process without a word."""
    monkeypatch.setenv("KVLAB_CPU_ARCH", "some-processor")
    monkeypatch.setattr(native, "_find_or_build", lambda *_: None)
    monkeypatch.setattr(native, "_instruction_set", lambda _: "avx2" if "vnni" in built_for else built_for)
    monkeypatch.setattr(native, "_int8_path", lambda _: built_for)
    monkeypatch.setattr(native, "_cpu", lambda: f"x86_64flags : {flags}")
    with caplog.at_level(logging.WARNING), pytest.raises(KernelError) as refusal:
        native.load()
    native._attempt.cache_clear()
    assert str(refusal.value) == (
        f"KVLAB_CPU_ARCH=some-processor: needs {built_for}, which this processor has not; unset it, or use {advice}"
    )


def test_int8_weights_without_kernels_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    config = compose_run(*TINY, "tracking=off", "executor.weights=int8")
    with pytest.raises(ConfigError, match=r"executor\.weights=int8: needs the native kernels: CXX=/nonexistent"):
        execute(context_of(config, tmp_path, Terminal(quiet=True)))
