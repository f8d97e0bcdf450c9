"""The load test and a real load tool, as long as a test may take."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import median

import pytest

from experiments.environments import program
from experiments.load_tools.run import SIMULATED
from experiments.load_tools.tools import AIPERF, Load, aiperf
from experiments.server_load.run import attack
from experiments.serving import Recording, ServerProcess
from kvlab.cli.compose import compose_one
from kvlab.config.server import ServerConfig
from kvlab.server.build import build_serving
from tests.support.published import smollm2_file
from tests.support.serving import running, wait_until_empty

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_many_clients_under_attack_lose_and_leak_nothing(tmp_path: Path) -> None:
    outcome = attack(tmp_path, seconds=6, clients=40, seed=1, every_s=1.0, patience_s=2.0)
    assert outcome.findings == []
    assert outcome.ends["complete"]
    assert outcome.ends["left"]


@pytest.mark.skipif(not (3, 11) <= sys.version_info < (3, 14), reason="AIPerf runs on Python 3.11 to 3.13")
def test_aiperf_runs_to_its_end(tmp_path: Path) -> None:
    smollm2_file()
    try:
        program(AIPERF, timeout_s=90)
    except RuntimeError as error:
        pytest.skip(f"AIPerf cannot be had: {error}")
    load = Load(requests=16, concurrency=4, output_tokens=16)
    config, records = compose_one(SIMULATED, "a server"), tmp_path / "served.jsonl"
    settings = ServerConfig(port=0)
    with running(build_serving(config, settings, Recording(config.model.name, records))) as server:
        reported = aiperf(server.url, "llama3_1_8b", load, tmp_path, timeout_s=120)
        wait_until_empty(server.serving)
    served = ServerProcess(server.url, os.getpid(), records).served(last=load.requests)
    assert reported.requests == load.requests
    assert [each.output_tokens for each in served] == [16] * load.requests
    # A busy machine makes the client's times longer, never shorter.
    assert reported.e2e_ms > 0.95 * median(each.e2el_ms for each in served)
