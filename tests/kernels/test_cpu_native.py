"""Building and finding the library of native kernels."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.attention.backends.cpu import CpuAttention
from kvlab.attention.base import AttentionSpec
from kvlab.attention.registry import select_backend
from kvlab.errors import BackendError, KernelError
from kvlab.kernels.cpu import interface, native
from kvlab.kernels.cpu.cache import keep
from tests.kernels.conftest import build_for

SPEC = AttentionSpec(4, 2, 16, 0.25, "bfloat16", "cpu")


#: A library that others of these tests need too.
ARCHITECTURE = "x86-64"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own."""
    build_for(ARCHITECTURE, monkeypatch)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def library() -> Path:
    """The library, compiled once for all sessions of tests."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        build_for(ARCHITECTURE, patch)
        return Path(native.load()._name)


@pytest.fixture
def compiled_before(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that gives the library at once."""
    monkeypatch.setattr(native, "_run", lambda command: shutil.copy(library, command[-1]))


@pytest.fixture
def filled(cache: Path, compiled_before: None) -> Path:
    """The test's own cache, with the library."""
    native.load()
    native._attempt.cache_clear()
    return cache


@pytest.fixture
def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\necho 'the disk is on fire' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return compiler


@pytest.mark.slow
def test_is_compiled_once_and_then_found(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(path.suffix for path in filled.iterdir()) == [".lock", ".sha256", ".so"]
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("built again"))
    native.load()


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_before")
def test_a_library_of_another_system_is_built_again(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (built,) = filled.glob("*.so")
    (tmp_path / "other").mkdir()
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"intact, and no library here")
    keep(foreign, tmp_path / "other" / built.name)  # elsewhere: what has been loaded from a path stays loaded
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "other"))
    native.load()
    assert (tmp_path / "other" / built.name).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_before")
def test_another_machine_another_library(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_cpu", lambda: "another processor")
    native._attempt.cache_clear()
    native.load()
    assert len(list(filled.glob("*.so"))) == 2


def test_without_a_compiler_auto_takes_the_next_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert [select_backend(SPEC).name for _ in range(3)] == ["sdpa"] * 3
    (message,) = caplog.messages
    assert "no C++ compiler" in message
    assert "CXX" in message


def test_chosen_by_name_it_is_refused_with_the_compilers_words(broken_compiler: Path) -> None:
    with pytest.raises(BackendError, match="attention=cpu cannot run here") as refusal:
        select_backend(SPEC, "cpu")
    assert str(broken_compiler) in str(refusal.value)
    assert "the disk is on fire" in str(refusal.value)


def test_a_failed_build_leaves_nothing(broken_compiler: Path, cache: Path) -> None:
    with pytest.raises(KernelError):
        native.load()
    assert [path.name for path in cache.iterdir()] == ["build.lock"]


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelError, match="CXX=no-such-compiler: there is no such compiler"):
        native.load()


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (AttentionSpec(4, 2, 16, 0.25, "float16", "cpu"), "not float16"),
        (AttentionSpec(4, 2, 16, 0.25, "float32", "cuda"), "not on cuda"),
        (AttentionSpec(4, 2, 16, 0.25, "float32", "cpu", causal=False), "only causal"),
    ],
)
def test_what_it_does_not_compute(spec: AttentionSpec, reason: str) -> None:
    with pytest.raises(BackendError, match=reason):
        select_backend(spec, "cpu")


@pytest.mark.usefixtures("filled")
@pytest.mark.slow
def test_with_another_interface_auto_takes_the_next_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(interface.CONSTANTS, "TILE_SIDE", 17)
    with caplog.at_level(logging.WARNING):
        assert select_backend(SPEC).name == "sdpa"
    assert "TILE_SIDE: 16 in the native library, 17 in Python" in caplog.text


def test_readers_of_formats_are_built_for_who_stores_in_formats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_formats(*_: object) -> None:
        raise KernelError("c++ failed:\nthe disk is full")

    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "_find_or_build", without_formats)
    assert CpuAttention().supports(SPEC).ok
    assert not caplog.messages
    for _ in range(2):
        refusal = CpuAttention().supports(replace(SPEC, kv_dtypes=("bfloat16", "int8")))
        assert (refusal.ok, refusal.reason) == (False, "c++ failed:\nthe disk is full")
    assert caplog.messages == ["native CPU kernels do not read formats of K and V: c++ failed:\nthe disk is full"]
