"""The library of native kernels: compiled once for this machine, loaded from a cache afterwards."""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch  # first, so that the library uses the same OpenMP runtime as torch

from kvlab.errors import KernelError
from kvlab.kernels.cpu.cache import BUILD_PREFIX, building, cache_folder, check_folder, check_intact, keep
from kvlab.kernels.cpu.interface import bind
from kvlab.kernels.cpu.paths import Paths, choose_for, take

# Units of compilation: source files and an extra flag. Those that take longest come first; small ones are one unit,
# which reads their headers once.
_Units = tuple[tuple[tuple[str, ...], str], ...]
_UNITS: _Units = (
    (("attention.cpp",), "-DKVLAB_ELEMENT_BYTES=2"),
    (("linear.cpp",), ""),
    (("elementwise.cpp", "packed_weight.cpp", "topk.cpp", "layers.cpp", "interface.cpp", "paths.cpp"), ""),
    (("attention.cpp",), "-DKVLAB_ELEMENT_BYTES=4"),
)
# Those of the library that reads K and V in formats (`load_formats`).
_FORMAT_UNITS: _Units = (
    (("attention_formats.cpp",), "-DKVLAB_FORMATS=0"),
    (("interface.cpp", "attention_formats.cpp"), "-DKVLAB_FORMATS=1"),
)
_HEADERS = tuple(sorted(path.name for path in Path(__file__).parent.glob("*.hpp")))
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
# The names of instruction sets in /proc/cpuinfo.
_CPU_FLAGS = {
    "avx512-bf16": "avx512_bf16",
    "avx512-vnni": "avx512_vnni",
    "avx512": "avx512dq",
    "avx-vnni": "avx_vnni",
    "avx2": "avx2",
}

# The environment variables that decide which library is loaded.
_SETTINGS = ("CXX", "KVLAB_CPU_ARCH", "KVLAB_CXXFLAGS", "KVLAB_CPU_PATHS", "KVLAB_CACHE", "XDG_CACHE_HOME", "HOME")

_log = logging.getLogger(__name__)


def load() -> ctypes.CDLL:
    """The library, compiled if it is not in the cache folder (`cache_folder`). Where that folder cannot be used, or
    others may write to it, a warning says so, and the library is compiled for this process alone.

    `CXX` names the compiler, `KVLAB_CPU_ARCH` the instruction set if it should not be this machine's own
    (`-march`: `x86-64-v3` for AVX2, `x86-64` for neither). `KVLAB_CXXFLAGS` are further flags for the compiler,
    for example `-O1 -g -fsanitize=address,undefined`. `KVLAB_CPU_PATHS` names the instructions that products may
    use (`paths`). Raises KernelError, with the reason, where the library cannot be built or loaded; the first time
    the reason is logged, too.
    """
    return _loaded()[0]


def load_formats() -> ctypes.CDLL:
    """The library, ready to read K and V in every format of `kv/formats.py`. What does so is a library of its own,
    compiled and kept as `load` says, so that who stores K and V plainly need not wait for it. Raises KernelError as
    `load` does.
    """
    outcome = _attempt_formats(*map(os.environ.get, _SETTINGS))
    if isinstance(outcome, KernelError):
        raise outcome
    return outcome


def paths() -> Paths:
    """Which of the library's instructions multiply. Raises KernelError as `load` does."""
    return _loaded()[1]


def _loaded() -> tuple[ctypes.CDLL, Paths]:
    outcome = _attempt(*map(os.environ.get, _SETTINGS))
    if isinstance(outcome, KernelError):
        raise outcome
    return outcome


def instruction_set() -> str:
    """The instructions that the library uses: `avx512-bf16` (`avx512-bf16, amx` with matrix tiles), `avx512`,
    `avx2`, `neon-bf16`, `neon` or `portable`. Raises KernelError as `load` does.
    """
    return _instruction_set(load())


def int8_path() -> str:
    """The instructions of products in integers: `avx512-vnni`, `avx-vnni`, or those of `instruction_set` without
    `-bf16` and tiles; behind it `, amx` where matrix tiles multiply many rows. Raises KernelError as `load` does.
    """
    return _int8_path(load())


def _instruction_set(library: ctypes.CDLL) -> str:
    name: bytes = library.kvlab_instruction_set()
    return name.decode()


def _int8_path(library: ctypes.CDLL) -> str:
    name: bytes = library.kvlab_int8_path()
    return name.decode()


@lru_cache
def _attempt(
    compiler: str | None, architecture: str | None, flags: str | None, allowed: str | None, *_cache: str | None
) -> tuple[ctypes.CDLL, Paths] | KernelError:
    """The library and its paths, or the reason why there is none. Cached either way, since every call of a kernel
    needs it.
    """
    try:
        library = _find_or_build(compiler, architecture or "native", flags or "")
        for name in (_instruction_set(library), _int8_path(library)):
            _check_processor(name, architecture)
        return library, _take_paths(library, allowed)
    except KernelError as error:
        _log.warning("native CPU kernels are off: %s", error)
        return error


@lru_cache
def _attempt_formats(*settings: str | None) -> ctypes.CDLL | KernelError:
    """The library with its readers of formats, or the reason why there is none."""
    compiler, architecture, flags, *_ = settings
    try:
        library = load()
        readers = _find_or_build(compiler, architecture or "native", flags or "", _FORMAT_UNITS, "formats")
        library.kvlab_use_formats(readers.kvlab_format_readers())
        return library
    except KernelError as error:
        _log.warning("native CPU kernels do not read formats of K and V: %s", error)
        return error


def _take_paths(library: ctypes.CDLL, allowed: str | None) -> Paths:
    """Choose what multiplies, by rates that are kept beside the library."""
    paths = choose_for(library, allowed, Path(library._name).with_suffix(".rates"))
    take(library, paths)
    return paths


def _open(path: Path) -> ctypes.CDLL:
    """The library, its functions ready to be called. Raises OSError if the file is no library, KernelError if its
    interface is not the one that this package was written for.
    """
    library = ctypes.CDLL(str(path))
    bind(library)
    return library


def _find_or_build(
    compiler: str | None, architecture: str, flags: str, units: _Units = _UNITS, stem: str = "kernels"
) -> ctypes.CDLL:
    command = [_find_compiler(compiler), f"-march={architecture}", *_FLAGS, *_first_cache(), *shlex.split(flags)]
    folder = Path(__file__).parent
    sources = (name for names, _ in units for name in names)
    text = "".join((folder / name).read_text(encoding="utf-8") for name in (*sources, *_HEADERS))
    key = hashlib.sha256(
        "\0".join([text, *command, _compiler_stamp(command[0]), _cpu(), torch.__version__]).encode()
    )
    name = f"{stem}-{key.hexdigest()[:20]}.so"
    try:
        path = cache_folder() / name
        if (library := _load_intact(path)) is None:
            with building(path.parent):
                if (library := _load_intact(path, warn=True)) is None:  # or another process built it meanwhile
                    _build(command, path, units)
                    library = _load_built(command, path)
        return library
    except OSError as error:
        advice = "KVLAB_CACHE names another folder to keep them in"
        _log.warning("native kernels are compiled for this process alone: %s; %s", error, advice)
    try:
        with tempfile.TemporaryDirectory(prefix="kvlab-") as private:
            path = Path(private).resolve() / name
            check_folder(path.parent)
            _build(command, path, units)
            return _load_built(command, path)  # what is loaded stays when its file goes
    except OSError as error:
        raise KernelError(f"nor can they be compiled in a temporary folder: {error}") from error


def _load_intact(path: Path, *, warn: bool = False) -> ctypes.CDLL | None:
    """The library in the cache; None if it is not there, or not as it was built."""
    try:
        check_intact(path)
        return _open(path)
    except OSError as error:  # it is not there, was changed, or was built on another system
        if warn and path.exists():
            _log.warning("%s is not loaded, but built again: %s", path, error)
        return None


def _load_built(command: list[str], path: Path) -> ctypes.CDLL:
    try:
        return _open(path)
    except OSError as error:
        raise KernelError(f"what {command[0]} built cannot be loaded: {error}") from error


def _check_processor(instruction_set: str, architecture: str | None) -> None:
    """Raise KernelError if this processor lacks instructions of the library, which would end the process."""
    flag = _CPU_FLAGS.get(instruction_set.split(",")[0])
    known = _cpu().split()
    if flag is not None and "sse2" in known and flag not in known:
        raise KernelError(
            f"KVLAB_CPU_ARCH={architecture}: needs {instruction_set}, which this processor has not; unset it, or "
            f"use {'x86-64-v3' if 'avx2' in known else 'x86-64'}"
        )


def _find_compiler(wanted: str | None) -> str:
    for name in (wanted,) if wanted else _COMPILERS:
        if path := shutil.which(name):
            return path
    if wanted:
        raise KernelError(f"CXX={wanted}: there is no such compiler; unset it, or name one that is installed")
    raise KernelError(f"no C++ compiler (tried {', '.join(_COMPILERS)}); install one, or name it in CXX")


def _build(command: list[str], path: Path, units: _Units) -> None:
    """Compile all sources in parallel and link them into `path`, which appears complete or not at all. Raises
    OSError if its folder cannot be written to, KernelError for what the compiler says.
    """
    _log.info("compiling native kernels, once for this machine")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=BUILD_PREFIX) as folder:
        objects, compilations = [], []
        for number, (names, flag) in enumerate(units):
            *others, source = (str(Path(__file__).parent / name) for name in names)
            include = [argument for other in others for argument in ("-include", other)]
            objects.append(str(Path(folder) / f"{number}.o"))
            compilations.append([*command, *([flag] if flag else []), *include, "-c", source, "-o", objects[-1]])
        with ThreadPoolExecutor() as threads:
            list(threads.map(_run, compilations))
        library = Path(folder) / path.name
        _run([*command, "-shared", *objects, "-o", str(library)])
        keep(library, path)
    _log.info("compiled %s in %.1f s", path, time.perf_counter() - start)


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise KernelError(f"{command[0]} failed:\n" + "\n".join(result.stderr.strip().splitlines()[:10]))


def _compiler_stamp(compiler: str) -> str:
    """Changes with an update of the compiler. Asking it for its version takes longer than loading the library."""
    state = os.stat(compiler)
    return f"{state.st_size} {state.st_mtime_ns}"


def _first_cache() -> list[str]:
    """The flag that says how large a core's first cache is, where the system does."""
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index0/size").read_text().strip()
    except OSError:
        return []
    return [f"-DKVLAB_FIRST_CACHE_KB={size[:-1]}"] if size[:-1].isdigit() and size.endswith("K") else []


def _cpu() -> str:
    """The machine's instruction set, as far as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return platform.machine() + line
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()} {platform.node()}"
