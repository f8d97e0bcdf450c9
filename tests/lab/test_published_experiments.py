"""What is published under experiments/: commands that exist, pictures that are there and small."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.orders import benchmark as orders
from experiments.retention import benchmark as retention
from experiments.runs import configure
from kvlab.lab.run.plan import plan_run
from tests.support.forked import ROOT

PAGES = sorted((ROOT / "experiments").glob("*/README.md"))
PROMISED = ("contiguous_vs_paged", "blocks_and_batch", "block_size", "sharing", "eviction", "static_vs_continuous")


def test_each_promised_experiment_is_there() -> None:
    assert set(PROMISED) <= {page.parent.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_its_commands_and_pictures_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert re.search(r"^\*\*(Answer|Results)\.\*\* ", text, re.MULTILINE)
    for name in re.findall(r"src\.run experiment=(\w+)", text):
        assert (ROOT / "conf/experiment" / f"{name}.yaml").is_file(), name
    for module in re.findall(r"python3? -m (experiments\.[\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module
    for picture in re.findall(r"!\[[^]]*]\(([^)]+)\)", text):
        assert (page.parent / picture).stat().st_size < 200_000, picture


@pytest.mark.parametrize("device", [orders.DEVICE, retention.DEVICE], ids=["orders", "retention"])
def test_its_simulated_device_holds_its_pool(device: tuple[str, ...]) -> None:
    """What is planned beside a pool grows with what a framework is found to take."""
    assert plan_run(configure(list(device))).pool.num_blocks in (2048, 2177)


@pytest.mark.parametrize(("first", "code"), [("-m", 130), ("script.py", -2)])  # -m: while a script is looked for
def test_a_script_that_is_interrupted_ends_as_a_command(first: str, code: int) -> None:
    program = f"import sys; sys.argv = [{first!r}]; import experiments; raise KeyboardInterrupt"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (code, code != 130)
    assert (ended.stderr == "interrupted\n") == (code == 130)
