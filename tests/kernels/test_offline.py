"""Every kernel compiles for a GPU, here or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton import backends


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_without_overflowing_it(tmp_path: Path) -> None:
    """In a process of its own: in this one the kernels may be interpreted."""
    if "nvidia" not in backends.backends:
        pytest.skip("this triton does not compile for NVIDIA")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("offline.py")
    some = [
        "bfloat16 group 4 head_dim 80",
        "scatter torch.b",
        "rotary torch.b",
        "norm 1000 torch.b",
    ]  # all: a minute
    done = subprocess.run([sys.executable, script, *some], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert kernels == {"_decode", "_combine", "_prefill", "_scatter", "_rotary", "_rms_norm"}
