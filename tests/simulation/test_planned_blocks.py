"""The planner beside what vLLM reported at its start, version by version."""

from __future__ import annotations

from itertools import chain

import pytest

from experiments.planner_vs_vllm.run import Case, cases
from kvlab.config import FrameworkConfig
from kvlab.errors import ConfigError
from kvlab.planning.startup import Startup, graph_bytes, startup
from kvlab.simulation.accuracy import PLANNED

MIB = 2**20
COLD = 0.09  # a start that found its kernels compiled counts less than the plan, which cannot know it


def test_as_many_blocks_as_vllm_reported() -> None:
    today = [case for case in cases() if case.version[0].isdigit()]
    assert len(today) == 13
    assert {case: case.ratio for case in today} == {case: pytest.approx(1, abs=_bound(case)) for case in today}
    assert sorted(chain.from_iterable(PLANNED.values())) == sorted(round(case.ratio, 3) for case in today)


def _bound(case: Case) -> float:
    if case.version == "0.29.0":
        return COLD
    return 0.03 if case.version == "0.28.0" or "LMCache" in case.address else 0.01


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.11.0", Startup(38, unsure=True)),  # 14 with FlashInfer
        ("0.11.1", Startup(38)),
        ("0.15.1", Startup(38)),
        ("0.16.0", Startup(38, compiles=True)),
        ("0.19", Startup(14, 128, compiles=True)),
        ("0.21.0", Startup(14, compiles=True, graphs=True)),
        ("0.28.0", Startup(6, compiles=True)),
        (None, Startup(6, compiles=True, graphs=True)),
    ],
)
def test_a_version_counts_what_its_source_says(version: str | None, expected: Startup) -> None:
    assert startup(FrameworkConfig(version=version)) == expected


@pytest.mark.parametrize(
    ("version", "flashinfer", "expected"),
    [
        ("0.10.0", True, Startup(14)),  # as in vLLM's Docker images
        ("0.19", True, Startup(14, compiles=True)),
        ("0.21.0", False, Startup(14, 128, compiles=True, graphs=True)),
        ("0.28.0", True, Startup(6, compiles=True)),  # which samples without top-k at its start
    ],
)
def test_a_sampler_of_flashinfer_counts_less(version: str, flashinfer: bool, expected: Startup) -> None:
    assert startup(FrameworkConfig(version=version, flashinfer_sampler=flashinfer)) == expected


def test_other_frameworks_and_synchronous_vllm_count_as_before() -> None:
    assert startup(FrameworkConfig(name="vllm_synchronous")) == Startup()
    assert startup(FrameworkConfig(name="trtllm", tables="trtllm")) == Startup()


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"framework.version=newest: must be a version, as 0.24.0"):
        startup(FrameworkConfig(version="newest"))


def test_graphs_are_those_that_vllm_captures() -> None:
    # PIECEWISE=51 (largest=512), FULL=35 (largest=256), as logs of 256 sequences have it; 35 and 19 of 128.
    assert graph_bytes(256, 2048, 5120 * 2) == (51 + 35) * 20 * MIB
    assert graph_bytes(128, 2048, 4096 * 2) == (35 + 19) * 20 * MIB
    assert graph_bytes(256, 2048, 512) == (51 + 35) * 2 * MIB  # small tensors share segments of 2 MiB
    assert graph_bytes(1, 2048, 8192) == (2 + 1) * 2 * MIB
