"""What a running server tells about itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from pytest_bdd import then, when

from features.steps.server import Server
from kvlab.engine.protocol import EngineStats
from kvlab.engine.step import StepInput, StepResult
from kvlab.kv.view import CacheView


@when("another thread asks the server how it is in the middle of each step", target_fixture="told")
def asked_in_each_step(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[EngineStats]:
    told: list[EngineStats] = []
    execute = server.executor.execute
    with ThreadPoolExecutor(1) as other:

        def asked(step: StepInput, view: CacheView) -> StepResult:
            told.append(other.submit(server.engine.stats).result(timeout=30))
            return execute(step, view)

        monkeypatch.setattr(server.executor, "execute", asked)
        server.run()
    return told


@then("it was told")
def was_told(told: list[EngineStats], datatable: list[list[str]]) -> None:
    heading, *rows = datatable
    assert heading == ["in step", "running", "waiting", "batches", "output tokens", "blocks in use", "hit rate"]
    shown = [
        (s.running, s.waiting, s.batches, s.output_tokens, s.blocks_in_use, s.hit_rate and round(s.hit_rate, 2))
        for s in told
    ]
    assert [[str(each) for each in (step, *values)] for step, values in enumerate(shown, 1)] == rows
