"""Sweeps on a Ray cluster, for who has installed Ray."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.commands import TIMEOUT_S, Lab

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_a_run_whose_node_is_killed_begins_again_on_another(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    lab = Lab(tmp_path)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        launcher = ("hydra/launcher=ray", f"hydra.launcher.address={cluster.address}")
        served_slowly = ("workload.arrival=uniform", "workload.rate=0.2")  # 15 s
        sweep = lab.start("-m", "kv.num_blocks=8,9", *launcher, *served_slowly)
        deadline = time.monotonic() + TIMEOUT_S
        while not all((tmp_path / "out" / name / "config.yaml").exists() for name in "01"):
            assert sweep.returncode is None, sweep.finish()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        cluster.remove_node(second, allow_graceful=False)
        output = sweep.finish(TIMEOUT_S)
    finally:
        cluster.shutdown()
    assert sweep.returncode == 0, output
    assert "2 runs: 2 finished" in output
    assert sorted(run.state for run in lab.children()) == ["FINISHED", "FINISHED", "KILLED"]


def test_a_cluster_that_does_not_answer_is_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    ended = Lab(tmp_path).apart(
        "-m", "kv.num_blocks=8,9", "hydra/launcher=ray", "hydra.launcher.address=127.0.0.1:9"
    )
    assert ended.code == 1, ended.output
    assert "the launcher failed: hydra.launcher.address=127.0.0.1:9: no Ray cluster answers there" in ended.output
