"""Every kernel compiles for a GPU, here or not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from triton import backends

from experiments.gpu.occupancy import ARCHITECTURES, programs_by_limit

ROOT = Path(__file__).resolve().parents[2]


# Modules one after another, as if each had a process of its own, which would import PyTorch and Triton.
MODULES = """
import runpy, sys
for sys.argv in {commands}:
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """Without overflowing it. Attention, for a shape that has much to hold, spills nothing, copies 16 bytes and
    leaves room for two programs; all: `python -m experiments.gpu.compiled`.

    In another process: in this one the kernels may be interpreted. Triton compiles what changed since the last
    session.
    """
    if "nvidia" not in backends.backends:
        pytest.skip("this triton does not compile for NVIDIA")
    some = [
        "bfloat16 group 4 head_dim 80",
        "scatter torch.b",
        "rotary torch.b",
        "norm 1000 torch.b",
    ]  # all: a minute
    chosen = ["--architectures", "90", "--models", "llama3_2_3b", "--write", str(tmp_path / "tables.md")]
    commands = [["tests.kernels.offline", *some], ["experiments.gpu.compiled", *chosen]]
    done = subprocess.run(
        [sys.executable, "-c", MODULES.format(commands=commands)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert kernels == {"_decode", "_combine", "_prefill", "_scatter", "_rotary", "_rms_norm"}
    assert "5 kernels, 0 beyond a gate" in done.stderr
    assert re.search(r"\| h100_sxm \| 128 x 3, 24 heads \| [1-9]\d+ \|", (tmp_path / "tables.md").read_text())


def test_programs_at_once_follow_from_the_least_of_what_a_processor_has() -> None:
    """Figures of Nsight Compute's occupancy calculator."""
    found = programs_by_limit(ARCHITECTURES[90], registers=178, warps=8, shared_bytes=98_816)
    assert found == {"registers": 1, "shared": 2, "threads": 8, "programs": 32}
    assert programs_by_limit(ARCHITECTURES[90], registers=118, warps=4, shared_bytes=72_704)["registers"] == 4
    for shared_bytes, programs in ((49 * 1024, 2), (49 * 1024 + 1, 1)):  # of 100 KiB, 1 KiB more for each
        found = programs_by_limit(ARCHITECTURES[120], registers=72, warps=4, shared_bytes=shared_bytes)
        assert found["shared"] == programs
    columns = programs_by_limit(ARCHITECTURES[100], registers=64, warps=4, shared_bytes=0, tensor_columns=256)
    assert columns["tensor memory"] == 2
