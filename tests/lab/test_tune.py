"""The search: its space, its study, and the command in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

import kvlab.cli.tune
from kvlab.cli.compose import compose_run
from kvlab.cli.settings import read_settings
from kvlab.cli.tune import check
from kvlab.config import KVConfig, RunConfig, TrackingConfig
from kvlab.errors import CapacityError, ConfigError
from kvlab.lab.campaigns.tune.limit_search import Bracket, RateRange
from kvlab.lab.campaigns.tune.pictures import write_page
from kvlab.lab.campaigns.tune.searches import bracket, rate_range
from kvlab.lab.campaigns.tune.settings import TuneSettings
from kvlab.lab.campaigns.tune.space import BATCH, BLOCK, BLOCKS, TOKENS, Range, Space, build_space, check_fits
from kvlab.lab.campaigns.tune.study import best_trial, counted, open_study, search
from kvlab.lab.campaigns.tune.trials import Ended, Trials
from tests.support.commands import TINY, call
from tests.support.tracking import empty_store

MIB = 2**20
METRIC = "throughput/output_tokens_per_s"
ONE = Space({BATCH: Range(1, 64)}, (), {BATCH: 8})


def fits(_: dict[str, int]) -> None:
    """Anything."""


def measured_batch(_: int, values: dict[str, int]) -> Ended:
    """The size of the batch is what is measured."""
    return Ended({METRIC: float(values[BATCH])})


@pytest.fixture
def study(tmp_path: Path) -> Callable[..., optuna.Study]:
    return lambda: open_study(f"sqlite:///{tmp_path / 'tune.db'}", "a question", METRIC, 20)


@pytest.fixture(scope="module")
def paced() -> RunConfig:
    """Four requests per second, with a limit."""
    return compose_run([*TINY, "workload.arrival=uniform", "workload.rate=4", "slo.ttft_ms=500"]).config


# The space


def test_the_space_begins_at_the_configuration_and_ends_where_memory_and_workload_do() -> None:
    config = compose_run([*TINY, "workload.num_requests=20"]).config
    space = build_space(config, 200 * MIB, frozenset())
    assert set(space.ranges) == {BATCH, BLOCKS, TOKENS}
    assert space.ranges[BATCH] == Range(1, 20)  # more sequences than there are never run
    assert space.start[BATCH] == 20
    assert space.start[BLOCK] == 16
    tight = build_space(config, 66 * MIB, frozenset())
    assert tight.ranges[BLOCKS].high <= space.ranges[BLOCKS].high
    stored = 1.25 * 20 * 26  # tokens, at most
    assert space.ranges[BLOCKS].high <= stored / min(space.block_sizes)


def test_what_is_given_is_not_searched() -> None:
    config = compose_run([*TINY, "kv.block_size=16"]).config
    space = build_space(config, 100 * MIB, frozenset({BLOCK, TOKENS}))
    assert space.block_sizes == ()
    assert set(space.ranges) == {BATCH, BLOCKS}
    with pytest.raises(ConfigError, match="leave one of them free"):
        build_space(config, 100 * MIB, frozenset({BATCH, BLOCKS, BLOCK, TOKENS}))


def test_a_step_too_large_for_the_memory_begins_smaller_unless_it_is_fixed() -> None:
    config = compose_run([*TINY, "scheduler.max_batched_tokens=4096"]).config
    space = build_space(config, 68 * MIB, frozenset())
    assert space.start[TOKENS] < 4096
    scheduler = replace(config.scheduler, max_batched_tokens=space.start[TOKENS])
    check_fits(replace(config, scheduler=scheduler, kv=KVConfig(num_blocks=8)), 68 * MIB)
    with pytest.raises(CapacityError, match=r"memory=68\.0 MiB"):
        build_space(config, 68 * MIB, frozenset({TOKENS}))


def test_a_memory_smaller_than_the_weights_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"memory=97\.7 KiB: qwen3_tiny"):
        build_space(compose_run(TINY).config, 100_000, frozenset())


def test_a_point_beyond_the_memory_does_not_fit_and_one_too_small_for_a_request_neither() -> None:
    config = compose_run(TINY).config
    fitting = replace(config, kv=KVConfig(num_blocks=8))
    check_fits(fitting, 100 * MIB)
    with pytest.raises(CapacityError, match="more"):
        check_fits(replace(config, kv=KVConfig(num_blocks=10**6)), 100 * MIB)
    with pytest.raises(CapacityError, match="too small for one sequence"):
        check_fits(replace(config, kv=KVConfig(num_blocks=1)), 100 * MIB)


# The study


def test_more_is_better_or_less_as_the_metric_has_it(study: Callable[..., optuna.Study], tmp_path: Path) -> None:
    assert study().direction == optuna.study.StudyDirection.MAXIMIZE
    other = open_study(f"sqlite:///{tmp_path / 'b.db'}", "x", "latency/ttft_ms_p99", 20)
    assert other.direction == optuna.study.StudyDirection.MINIMIZE


def test_a_search_stops_at_its_trials_and_goes_on_from_there(study: Callable[..., optuna.Study]) -> None:
    tried: list[int] = []

    def measure(number: int, values: dict[str, int]) -> Ended:
        tried.append(values[BATCH])
        return Ended({METRIC: -abs(values[BATCH] - 30.0)})

    list(search(study(), ONE, METRIC, 5, check=fits, measure=measure, ended=[]))
    assert tried[0] == 8  # where the configuration is
    assert len(tried) == len(set(tried)) == 5
    again = study()
    list(search(again, ONE, METRIC, 12, check=fits, measure=measure, ended=[]))
    assert len(tried) == len(set(tried)) == 12  # nothing twice, across both
    assert len(counted(again)) == 12
    best = best_trial(again)
    assert best is not None
    assert best.value == max(-abs(value - 30.0) for value in tried)


def test_what_does_not_fit_is_left_out_with_its_reason_and_does_not_count(
    study: Callable[..., optuna.Study],
) -> None:
    def check(values: dict[str, int]) -> None:
        if values[BATCH] > 8:
            raise CapacityError(f"{values[BATCH]} is too many")

    opened = study()
    trials = list(search(opened, ONE, METRIC, 4, check=check, measure=measured_batch, ended=[]))
    pruned = [trial for trial in trials if trial.state is TrialState.PRUNED]
    assert pruned
    assert all("is too many" in trial.user_attrs["reason"] for trial in pruned)
    assert len(counted(opened)) == 4


@pytest.mark.slow
def test_a_small_space_ends_the_search_when_it_is_used_up(
    study: Callable[..., optuna.Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlab.lab.campaigns.tune.study._MAX_IDLE", 8)
    opened, two = study(), Space({BATCH: Range(1, 2)}, (), {BATCH: 1})
    list(search(opened, two, METRIC, 10, check=fits, measure=measured_batch, ended=[]))
    assert len(counted(opened)) == 2


def test_an_interrupted_trial_ends_the_search_and_is_not_counted(study: Callable[..., optuna.Study]) -> None:
    opened = study()
    ends = iter([Ended({METRIC: 1.0}), Ended(error="it broke"), Ended(interrupted=True)])
    kept: list[FrozenTrial] = []
    list(search(opened, ONE, METRIC, 9, check=fits, measure=lambda *_: next(ends), ended=kept))
    assert [trial.state for trial in counted(opened)] == [TrialState.COMPLETE, TrialState.FAIL]
    assert len(opened.trials) >= 3
    assert [(trial.state, trial.params) for trial in kept] == [(t.state, t.params) for t in counted(opened)]


def test_a_trial_that_a_killed_search_left_open_is_closed(study: Callable[..., optuna.Study]) -> None:
    opened = study()
    trial = opened.ask()
    trial.set_user_attr("process", "elsewhere:1:1")
    assert study().trials[0].state is TrialState.FAIL
    assert counted(study()) == []


def test_a_database_that_cannot_be_used_is_named() -> None:
    with pytest.raises(ConfigError, match="storage=sqlite:////no/such/place\\.db: cannot be used"):
        open_study("sqlite:////no/such/place.db", "x", "duration_s", 3)


# The largest rate


def rates(config: RunConfig, most: float, bounds: str | None = None, precision: float = 5.0) -> list[Any]:
    """The rates that a search tries where those up to `most` hold, and what it finds."""
    tried: list[Any] = []
    tries = bracket(rate_range(config.workload, bounds), precision)
    try:
        rate = next(tries)
        while True:
            tried.append(rate)
            rate = tries.send(rate <= most)
    except StopIteration as stop:
        return [*tried, stop.value]


def test_the_largest_rate_is_bracketed_in_few_runs(paced: RunConfig) -> None:
    assert rates(paced, 100.0, precision=20) == [4, 8, 16, 32, 64, 128, 90.51, 107.6, Bracket(90.51, 107.6)]
    for most in (0.2, 3.9, 4.0, 77.7):
        *tried, found = rates(paced, most)
        assert found.holds <= most < found.fails <= 1.05 * found.holds
        assert len(tried) <= 10
        assert len(set(tried)) == len(tried)


def test_a_search_stays_within_its_bounds(paced: RunConfig) -> None:
    assert rates(paced, 100.0, "1-30") == [4, 8, 16, 30, Bracket(holds=30)]
    assert rates(paced, 0.5, "1-30") == [4, 2, 1, Bracket(fails=1)]
    assert rates(paced, 100.0, "40-50") == [40, 50, Bracket(holds=50)]
    assert rates(paced, 0.0)[-2:] == [4 / 32, Bracket(fails=4 / 32)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arrival": "burst"}, "workload.arrival=burst: all requests at once have no rate"),
        ({"concurrency": 4}, "workload.concurrency=4: a closed loop has no arrival rate"),
        ({"source": "jsonl", "path": "x"}, "workload.source=jsonl: the file says when its requests arrive"),
    ],
)
def test_a_workload_without_a_rate_is_refused(paced: RunConfig, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rate_range(replace(paced.workload, **changes))
    assert words in str(refused.value)


def test_a_traces_rate_is_its_scale(paced: RunConfig) -> None:
    trace = replace(paced.workload, source="azure", path="x", arrival="trace", rate_scale=2.0)
    assert rate_range(trace) == RateRange("workload.rate_scale", 2.0, 2 / 32, 64.0)
    for bounds in ("5", "5-2", "0-2", "a-b", "-1-3"):
        with pytest.raises(ConfigError, match="write the lowest and the highest rate"):
            rate_range(paced.workload, bounds)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (98.9, "no rate holds: even workload.rate=3, the lowest rate tried, has 98.9 % within, goodput -"),
        (98.953, "no rate holds: even workload.rate=3, the lowest rate tried, has 98.95 % within, goodput -"),
        (99.0, "every rate holds: even workload.rate=5, the highest rate tried, has 99.0 % within, goodput -"),
        (None, "workload.rate=4: it broke"),
    ],
)
def test_without_a_largest_rate_a_search_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float | None, words: str
) -> None:
    ended = Ended(error="it broke") if share is None else Ended({"slo/attainment": share})
    monkeypatch.setattr(Trials, "measure", lambda *_, **__: ended)
    monkeypatch.setattr("kvlab.lab.campaigns.tune.searches.RateSearch._draw", lambda *_: None)
    paced = ["workload.arrival=uniform", "workload.rate=4", "slo.ttft_ms=500", "tracking=off", f"output={tmp_path}"]
    found = call(kvlab.cli.tune.main, "find=rate", "rates=3-5", *paced, *TINY)
    assert found.code == 1
    assert words in found.output


def test_an_interrupted_search_for_a_rate_concludes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([Ended({"slo/attainment": 50.0}), Ended(interrupted=True)])

    def measure(runs: Trials, *_: object, **__: object) -> Ended:
        ended = next(ends)
        runs.interrupted = ended.interrupted
        return ended

    monkeypatch.setattr(Trials, "measure", measure)
    paced = ["workload.arrival=uniform", "workload.rate=4", "slo.ttft_ms=500", "tracking=off", f"output={tmp_path}"]
    found = call(kvlab.cli.tune.main, "find=rate", *paced, *TINY)
    assert found.code == 130
    assert "workload.rate=4: 50.0 % within" in found.output
    assert "interrupted: what was tried is kept; the same command goes on from there" in found.output
    assert "rate holds" not in found.output


# The command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "optimize=null: name a metric"),
        (["find=speed"], "find=speed: unknown; known: rate, replicas"),
        (["find=replicas", "rates=1-2"], "rates=1-2: is for find=rate"),
        (["find=rate", "trials=3"], "trials=3: has no place beside find=rate"),
        (["slo.ttft_ms=5", "rates=1-2"], "rates=1-2: is for find=rate"),
        (["find=rate", "attainment=101"], "attainment=101: must be more than 0, and at most 100"),
        (["find=rate", "precision=0"], "precision=0: must be from 0.5 to 100"),
        (["optimize=capacity/kv_bytes"], "neither more nor less of it is better"),
        (["optimize=throughput/output_tokens_per_s", "memory=much"], "memory=much: is not a size"),
        (["optimize=throughput/output_tokens_per_s", "trials=0"], "trials=0: must be a whole number"),
        (["optimize=throughput/output_tokens_per_s", "kv.memory=1MiB"], "kv.memory=1MiB: a search chooses"),
        (["optimize=throughput/output_tokens_per_s", "sweep=policies"], "sweep=policies: has no place in a search"),
        (["optimize=throughput/output_tokens_per_s", "--fast"], "option=--fast: unknown"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_by_its_key(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(*read_settings(TuneSettings, arguments))
    assert words in str(refused.value)


def tune(*arguments: str) -> tuple[int, str]:
    ended = call(kvlab.cli.tune.main, "optimize=throughput/output_tokens_per_s", *arguments, *TINY)
    return ended.code, ended.output


def test_equal_searches_leave_equal_pages(tmp_path: Path) -> None:
    pages = []
    for name in ("one.html", "two.html"):
        study = optuna.create_study(direction="maximize")
        for block, batch in ((8, 4), (16, 4), (16, 8), (32, 2)):
            space = {key: IntDistribution(1, 64) for key in (BLOCK, BATCH)}
            done = create_trial(params={BLOCK: block, BATCH: batch}, distributions=space, value=block * batch)
            study.add_trial(done)
        write_page(study, "throughput/output_tokens_per_s", "kvlab run", None, tmp_path / name)
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1]
    assert "Two settings at a time" in pages[0]


@pytest.mark.slow
def test_the_best_within_a_budget_is_printed_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvlab.lab.tracking import open_store
    from kvlab.lab.tracking.search import find_runs

    (tmp_path / "store.db").write_bytes(empty_store())
    where = [f"output={tmp_path}", f"tracking.uri=sqlite:///{tmp_path / 'store.db'}", "memory=68MiB"]
    code, output = tune("trials=3", *where)
    assert code == 0, output
    assert "throughput/output_tokens_per_s within 68.0 MiB: 3 trials" in output
    (command,) = [line for line in output.splitlines() if line.startswith("kvlab run ")]
    chosen = dict(text.split("=", 1) for text in command.split() if text.startswith(("kv.", "scheduler.")))
    assert set(chosen) == {BATCH, BLOCKS, BLOCK, TOKENS}
    check_fits(compose_run([*TINY, *(f"{key}={value}" for key, value in chosen.items())]).config, 68 * MIB)
    (folder,) = tmp_path.glob("throughput-*/search")
    assert (folder / "tune.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "tune.html").read_text()
    assert "Trial by trial" in page
    assert "<script src=" not in page  # it needs no network

    code, output = tune("trials=4", *where)
    assert "4 trials, 3 done before" in output
    runs = find_runs(open_store(TrackingConfig(uri=f"sqlite:///{tmp_path / 'store.db'}"), tmp_path), "kvlab", "")
    (parent,) = [run for run in runs if run.tags.get("kvlab.kind") == "tune"]
    children = [run for run in runs if run.tags.get("mlflow.parentRunId") == parent.run_id]
    assert [run.finished for run in children] == [True] * 4
    assert parent.metrics["throughput/output_tokens_per_s"] == max(
        run.metrics["throughput/output_tokens_per_s"] for run in children
    )
