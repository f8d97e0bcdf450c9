"""The recipes of docs/extending, run as they stand: the file is written, then the commands are executed."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from kvlab.cli.main import main
from kvlab.core import FinishReason, RequestRecord
from kvlab.registry import KEYS, registry
from tests.support.runs import run_small

RECIPES = Path(__file__).parents[2] / "docs/extending"


@pytest.fixture
def plugin(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Write the recipe's files into a folder that Python imports from; returns its commands as words."""
    text = (RECIPES / f"{request.param}.md").read_text(encoding="utf-8")
    for name, code in re.findall(r"```python title=\"(\w+\.py)\"\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    for known in map(registry, KEYS):  # what a recipe registers is gone after its test
        monkeypatch.setattr(known, "_entries", {name: known.get(name) for name in known.names()})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (commands,) = re.findall(r"```console\n(.*?)```", text, re.DOTALL) or [""]
    return [line.split() for line in commands.splitlines()]


#: What a run needs to be small and still to use what the recipe adds, and a metric that shows it.
SMALL = {"workload.num_requests": "12", "scheduler.max_batch_size": "6", "debug": "audit"}
GROW = {"workload.prompt_len": "{min: 20, max: 30}", "workload.output_len": "{min: 30, max: 40}"}


@pytest.mark.parametrize(
    ("plugin", "setting", "changes", "shown_by"),
    [
        ("scheduling_order", "scheduler.order", {}, "requests/completed"),
        ("preemption_victim", "scheduler.preemption.victim", GROW | {"kv.num_blocks": "8"}, "requests/preemptions"),
        ("eviction_policy", "kv.eviction", {"kv.num_blocks": "40"}, "kv/evicted_blocks"),
        ("attention_backend", "attention.backend", {}, "requests/completed"),
        ("workload_source", "workload.source", {}, "requests/completed"),
        ("kv_backend", "kv.backend", {}, "requests/completed"),
        ("router", "fleet.router", {}, "requests/completed"),
        ("model", "model.family", {}, "requests/completed"),
    ],
    indirect=["plugin"],
)
def test_a_run_uses_what_the_recipe_adds(
    plugin: list[list[str]], setting: str, changes: dict[str, str], shown_by: str, tmp_path: Path
) -> None:
    ((program, command, *written),) = plugin
    assert (program, command) == ("kvlab", "run")
    settings = dict(text.split("=", 1) for text in written)
    assert setting in settings
    settings = SMALL | settings | changes
    result = run_small(tmp_path / "run", *(f"{key}={value}" for key, value in settings.items()))
    assert result.metrics["requests/completed"] == 12
    assert result.metrics[shown_by] > 0


@pytest.mark.parametrize("plugin", ["engine"], indirect=True)
def test_another_engine_is_measured_and_reported(
    plugin: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (python, script), report = plugin
    assert (python, *report[:2]) == ("python", "kvlab", "report")
    runpy.run_path(script, run_name="__main__")
    monkeypatch.setattr(sys, "argv", report)
    main()
    assert "output tokens" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "outputs/one_at_a_time/summary.json").read_text())["metrics"]
    assert metrics["requests/completed"] == 40
    assert 50 < metrics["throughput/output_tokens_per_s"] < 100


@pytest.mark.parametrize("plugin", ["metric"], indirect=True)
def test_the_metric_is_the_longest_gap(plugin: list[list[str]]) -> None:
    import longest_gap  # type: ignore[import-not-found]

    def record(*times: float, reason: FinishReason = FinishReason.LENGTH) -> RequestRecord:
        return RequestRecord("r", 0, 0.0, 1, (1,) * len(times), times, reason, times[-1])

    records = [record(1.0, 1.25, 2.0), record(3.0), record(1.0, 5.0, reason=FinishReason.FAILED)]
    assert longest_gap.longest_gap(records) == {"latency/itl_ms_max": 750.0}
    assert longest_gap.longest_gap(records[1:]) == {}
