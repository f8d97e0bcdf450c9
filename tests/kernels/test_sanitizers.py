"""The native kernels' tests once more, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
CHECKED = ("attention", "linear", "int8", "elementwise", "topk", "paths")
ARCHITECTURES = ("native", "x86-64-v3", "x86-64 and not x86-64-v3")  # as pytest's -k takes them
WHOLE = os.environ.get("KVLAB_SANITIZE") == "all"
FLAGS = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
# Compiles in a fifth of the time: most of it goes into optimizing the checks. Without that, kernels run slower, and
# no access is optimized away. AddressSanitizer finds what is left out, but for pointers that overflow.
QUICK = " -O0 -fno-sanitize=null,object-size,vptr,pointer-overflow"

# Each call in a process of its own, which a finding ends; they share the imports.
CALLS = """
import ctypes, os, torch
del os.environ["LD_PRELOAD"]  # see conftest.py
from kvlab.kernels.cpu.native import load
kernel = load().kvlab_gated

def behind(rows):
    out, x = torch.empty(rows, 32), torch.ones(4, 64)
    kernel(*[ctypes.c_void_p(x.data_ptr()), 4, 32, 0], ctypes.c_void_p(out.data_ptr()), 4, 1)

def beside(offset):
    out, x = torch.empty(4, 32), torch.ones(5, 64)
    kernel(*[ctypes.c_void_p(x.data_ptr() + offset), 4, 32, 0], ctypes.c_void_p(out.data_ptr()), 4, 1)

for call, number in (behind, 4), (behind, 3), (beside, 4), (beside, 2):
    if not (child := os.fork()):
        call(number)
        os._exit(0)
    print(call.__name__, number, "passed" if os.waitpid(child, 0)[1] == 0 else "failed", flush=True)
"""


@pytest.fixture(scope="module")
def sanitized() -> dict[str, str]:
    """The environment of a process whose library is built with sanitizers."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    if torch.cuda.is_available():
        pytest.skip("CUDA's driver and AddressSanitizer want the same addresses")
    asked = [compiler, "-print-file-name=libasan.so"]
    runtime = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if not Path(runtime).is_absolute():  # what is not found comes back as it was
        pytest.skip(f"{compiler} has no libasan.so that could be loaded ahead of Python")
    return {
        **{name: value for name, value in os.environ.items() if name != "KVLAB_CPU_ARCH"},
        "CXX": compiler,
        "KVLAB_CXXFLAGS": FLAGS if WHOLE else FLAGS + QUICK,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_wrong_call_is_caught_and_a_right_one_passes(sanitized: dict[str, str]) -> None:
    """Else the test below would prove nothing. Writes behind a tensor, and reads that are not aligned."""
    process = start(sanitized, "-c", CALLS)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    _, *found = re.split(r"^((?:behind|beside) \d \w+)\n", said, flags=re.MULTILINE)
    assert found[::2] == ["behind 4 passed", "behind 3 failed", "beside 4 passed", "beside 2 failed"], said
    overflow, _, misaligned, _ = found[1::2]
    assert "AddressSanitizer: heap-buffer-overflow" in overflow
    assert "runtime error: load of misaligned address" in misaligned


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_touch_only_what_is_theirs_and_do_nothing_undefined(
    architecture: str, sanitized: dict[str, str]
) -> None:
    if architecture != "native" and (not WHOLE or os.uname().machine != "x86_64"):
        pytest.skip("most of the time goes to the compiler; make sanitize runs them all")
    files = [f"tests/kernels/test_cpu_{name}.py" for name in CHECKED]
    options = ["-m", "pytest", "-x", "-p", "no:cacheprovider", "--confcutdir=tests/kernels"]
    # What one process with several libraries does is tested without sanitizers: it would compile two more.
    options += ["-k", f"({architecture}) and not test_libraries_of_other or test_each_gives_the_product"]
    if not WHOLE:  # more of the same products
        options[-1] = f"({options[-1]}) and not test_a_row_depends_on_no_other and not test_outputs_in_float32"
    process = start(sanitized | {"KVLAB_KERNEL_CASES": "all" if WHOLE else "values"}, *options, *files)
    said = process.communicate()[0]
    assert process.returncode == 0, said[-8000:]
    assert " passed" in said
