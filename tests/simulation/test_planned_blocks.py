"""The planner beside what vLLM's engine of today reported at its start, on A100 and H100."""

from __future__ import annotations

import pytest

from experiments.planner_vs_vllm.run import cases


def test_as_many_blocks_as_vllm_reported() -> None:
    today = {case: case.ratio for case in cases() if case.version in ("V1", "0.9.2", "0.15.1")}
    assert len(today) == 6
    assert today == {case: pytest.approx(1, abs=0.01) for case in today}
