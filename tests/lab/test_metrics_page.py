"""The catalogue, docs/metrics.md and a run's metrics agree: none has a metric that another lacks."""

from __future__ import annotations

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.core.step_log import StepLog
from kvlab.fleet.scale import Scaled
from kvlab.lab import machine_rates
from kvlab.lab.results.catalogue import CATALOGUE, SERIES, direction, metric
from kvlab.lab.results.log import FleetLog, RunLog
from kvlab.lab.results.roofline import MachineRates
from kvlab.lab.run.recording import _series
from tests.lab.test_metrics import step
from tests.support.endpoint import endpoint
from tests.support.runs import run_small

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text()
render = runpy.run_path(str(DOCS / "_site" / "metrics.py"))["render"]


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Of a real run that uses all that measures something: int8, a profile, limits, preemption, a roofline. And of
    one whose engine is not kvlab's.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_rates, "known_rates", lambda dtype: MachineRates(1e10, 1e11))
        result = run_small(
            tmp_path_factory.mktemp("run"),
            "kv.dtype=int8",
            "debug=profile",
            "figures=true",
            "workload.num_requests=6",
            "workload.group_len=16",
            "workload.salt_groups=true",
            "workload.pin_prefix=true",
            "kv.pinned_share=0.1",
            "kv.block_size=4",
            "kv.num_blocks=16",
            "kv.offload=1MiB",
            "slo.ttft_ms=1e6",
            "slo.tpot_ms=1e6",
            "scheduler.speculation.method=ngram",
            "scheduler.speculation.prompt_lookup_min=1",
        )
    assert result.status == "finished"
    with endpoint() as server:
        asked = ["engine=openai", f"engine.url={server.url}", "workload.arrival=uniform"]
        peer = run_small(tmp_path_factory.mktemp("peer"), *asked)
    assert peer.metrics["requests/completed"] == 2
    devices = ["executor=simulated", "hardware=l4", "kv.memory=1MiB", "kv.block_size=4"]
    devices += ["fleet.replicas=2", "fleet.prefill=1", "fleet.neighbours=true"]
    fleet = run_small(tmp_path_factory.mktemp("fleet"), *devices)
    # Of replicas that die, and that a rule starts, and of a shared store: features/fleets.feature.
    started = {"fleet/retried", "fleet/lost_tokens", "fleet/replicas_mean", "fleet/started"}
    started |= {f"fleet/store_{name}" for name in ("written_blocks", "loaded_blocks", "hit_tokens")}
    started |= {"engine/load_s", "engine/compile_s"}  # of engines in processes: tests/peers/test_process.py
    # Of a disk behind host memory: tests/engine/test_offload.py.
    disk = {f"kv/disk_{name}" for name in ("blocks_peak", "stored_blocks", "hit_tokens", "loaded_blocks")}
    return dict.fromkeys(started | disk, 0.0) | peer.metrics | fleet.metrics | result.metrics


def test_every_metric_of_a_run_is_in_the_catalogue_and_the_other_way_round(metrics: dict[str, float]) -> None:
    assert sorted(re.sub("(prefix_hit_rate)/0", r"\1/<salt>", name) for name in metrics) == sorted(CATALOGUE)
    assert metric("kv/prefix_hit_rate/0").label == "share of 0's prompt tokens found"


def test_the_page_is_what_the_catalogue_makes_of_it() -> None:
    assert render(PAGE) == PAGE, "run: python docs/_site/metrics.py"
    rows = [line.strip("|").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    assert [cells[0].strip(" `") for cells in rows] == list(
        dict.fromkeys(entry.family or entry.name for entry in CATALOGUE.values())
    )
    assert "| `throughput/output_tokens_per_s` | tok/s | more | `tokens/output` / `duration_s` |" in PAGE


def test_text_between_the_marks_is_replaced_and_all_else_is_kept() -> None:
    page = "before\n<!-- series -->\nold\n<!-- /series -->\nafter\n"
    made = render(page)
    assert made.startswith("before\n<!-- series -->\n`series/running`, ")
    assert made.endswith("\n<!-- /series -->\nafter\n")


def test_every_entry_says_what_a_reader_needs() -> None:
    for entry in CATALOGUE.values():
        assert entry.label
        assert entry.formula
        assert "|" not in entry.formula + entry.label, f"{entry.name}: a bar would end its cell on the page"


def test_formulas_of_metrics_give_the_metrics(metrics: dict[str, float]) -> None:
    """Those that are written with metrics and arithmetic alone are computed here, as they stand."""
    computed = set()
    for name, entry in CATALOGUE.items():
        terms = re.findall(r"`([^`]+)`", entry.formula)
        arithmetic = re.sub(r"`[^`]+`", "1", entry.formula)
        if not terms or not set(terms) <= set(metrics) or not re.fullmatch(r"[\d\s+*/()-]+", arithmetic):
            continue
        value = re.sub(r"`([^`]+)`", lambda match: repr(metrics[match[1]]), entry.formula)
        assert metrics[name] == pytest.approx(eval(value)), name
        computed.add(name)
    assert {
        "throughput/output_tokens_per_s",
        "throughput/total_tokens_per_s",
        "throughput/requests_per_s",
        "kv/blocks_allocated_per_s",
        "kv/blocks_freed_per_s",
    } <= computed


def test_every_series_is_in_the_catalogue_and_the_other_way_round() -> None:
    assert sorted(SERIES) == sorted(_series(RunLog()))


def test_series_of_replicas_are_of_all_together() -> None:
    """Blocks of 4 tokens, of which each replica has 10."""
    steps = [
        step(0, 2, running=3, blocks=5, tokens=20),
        replace(step(1, 3, running=2, blocks=3, tokens=6), replica=1),
        step(2, 4, running=1, blocks=1, tokens=4),
        step(5, 6, running=1, blocks=2, tokens=5),  # alone: the other has stopped, and has no cache any more
    ]
    scaled = [Scaled(3, "drain", 1), Scaled(4.5, "stop", 1)]
    fleet = FleetLog([], [], None, 0, [], [], {}, scaled, None, None, None, 0, None)
    points = _series(RunLog(steps=StepLog(steps), fleet=fleet))
    series = {name: [value for _, _, value in some] for name, some in points.items()}
    assert series["running"] == [3, 5, 3, 1]
    assert series["blocks_in_use"] == [5, 8, 4, 2]
    assert series["tokens_in_use"] == [20, 26, 10, 5]
    assert series["kv_usage_percent"] == [50, 40, 20, 20]
    filled = (20 / 20, 26 / 32, 10 / 16, 5 / 8)
    assert series["fragmentation_percent"] == pytest.approx([100 * (1 - share) for share in filled])


def test_values_labels_and_axes() -> None:
    output, slots = metric("throughput/output_tokens_per_s"), metric("capacity/token_slots")
    assert (output.text(1234.56), output.axis) == ("1,234.6 tok/s", "output tokens per second")
    assert (slots.text(1234.0), slots.axis) == ("1,234", "token slots")
    assert metric("latency/ttft_ms_p50").axis == "first token, p50, ms"
    assert metric("capacity/kv_bytes").text(2**27) == "128.0 MiB"
    assert metric("tokens/recomputed_share").axis == "tokens computed twice, of all computed, %"
    assert output.text(None) == "-"


def test_a_metric_that_is_not_in_the_catalogue_can_be_shown_too() -> None:
    assert (metric("mine/new").label, metric("mine/new").text(3.14159)) == ("mine/new", "3.14")
    assert direction("mine/new").more_is_better is None
