"""kvlab tune find=replicas where more replicas are not better, and where too few requests came to tell."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvlab.cli.tune
from kvlab.lab.campaigns.tune.trials import Ended, Trials
from tests.support.commands import TINY, call


def test_a_search_for_replicas_does_not_advise_more_where_more_are_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([50.0, 90.0, 60.0])
    monkeypatch.setattr(
        Trials,
        "measure",
        lambda *_, **__: Ended({"slo/attainment": next(shares), "slo/goodput_per_s": 1.0}),
    )
    monkeypatch.setattr("kvlab.lab.campaigns.tune.searches.ReplicaSearch._draw", lambda *_: None)
    simulated = ["executor=simulated", "hardware=l4", "fleet.replicas=4", "workload.arrival=uniform"]
    settings = ["workload.rate=4", "slo.ttft_ms=500", "tracking=off", f"output={tmp_path}"]
    found = call(kvlab.cli.tune.main, "find=replicas", *simulated, *settings, *TINY)
    assert found.code == 1
    said = " ".join(found.output.split())
    assert "none of those tried holds: fleet.replicas=2 comes nearest, 90.0 % within" in said
    assert "more are not better here: fleet.replicas=4 has 60.0 % within" in said


def test_an_answer_of_too_few_requests_says_so_also_where_it_was_measured_before(tmp_path: Path) -> None:
    traffic = ["workload.arrival=uniform", "workload.rate=1600", "workload.num_requests=20"]
    traffic.append("workload.output_len=60")
    settings = ["executor=simulated", "hardware=l4", "slo.ttft_ms=60000", "tracking=off", f"output={tmp_path}"]
    for _ in range(2):
        found = call(kvlab.cli.tune.main, "find=replicas", *TINY, *traffic, *settings)
        assert found.code == 0
        _, least, answer = found.output.partition("least: fleet.replicas=1: ")
        assert least
        assert "warning: of fleet.replicas=1: 0.0119 s of arrivals are too few to tell" in answer
        assert "Take more (workload.num_requests of " in answer
