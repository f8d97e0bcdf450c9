"""Products on an ARM processor, in an emulator: with NEON's instruction for pairs of bfloat16 and without."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvlab.kernels.cpu import native

pytestmark = pytest.mark.slow

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = ("linear.cpp", "packed_weight.cpp", "elementwise.cpp", "paths.cpp")


@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"no {COMPILER} or {EMULATOR}")
def test_products_agree_with_double_precision(tmp_path: Path) -> None:
    kernels, program = Path(native.__file__).parent, tmp_path / "program"
    files = [Path(__file__).with_name("other_processor.cpp"), *(kernels / name for name in SOURCES)]
    flags = [*native._FLAGS, "-O1", "-march=armv8.6-a", "-static", f"-I{kernels}"]
    subprocess.run([COMPILER, *flags, *map(str, files), "-o", str(program)], check=True)
    said = subprocess.run([EMULATOR, "-cpu", "max", str(program)], capture_output=True, text=True, check=False)
    assert (said.returncode, said.stdout) == (0, "neon neon-bf16: 480 of 480 products agree\n")
