"""Groups of devices that share the sequences have caches of their own, which a simulation has as one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from kvlab.cli.compose import compose_run
from kvlab.lab.run.execute import execute
from kvlab.lab.terminal import Terminal
from tests.support.runs import FEW_STEPS, context_of

OWN = ("hardware=h200_sxm", "executor.timing=roofline", "model=qwen3_30b_a3b", "workload=shared_prefix")
GROUPS = ("executor.attention_data_parallel=2", "executor.expert_parallel=2")


@pytest.mark.parametrize(
    ("settings", "said"),
    [(GROUPS, True), ((), False), ((*GROUPS, "kv.prefix_sharing=false"), False)],
)
def test_what_was_found_in_the_pool_of_another_group_is_said(
    settings: tuple[str, ...], said: bool, tmp_path: Path
) -> None:
    few = [text for text in FEW_STEPS if not text.startswith(("model", "executor", "workload.prompt"))]
    config = compose_run([*OWN, *few, "workload.num_requests=8", "workload.rate=1", *settings]).config
    console = Terminal(file=io.StringIO(), width=200)
    execute(context_of(config, tmp_path / "run", console))
    text = "warning: prefixes were found as in one pool; each of the 2 groups of devices has one of its own"
    assert (text in console.file.getvalue()) == said  # type: ignore[attr-defined]
