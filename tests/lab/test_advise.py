"""Advice: how gains are told from errors, how traffic is cut, what is ranked first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.simulated_vs_silicon.results import read as results
from kvlab.cli.advise import compose_today, current_words, words_of
from kvlab.config import WorkloadConfig
from kvlab.core import Request, SamplingParams
from kvlab.errors import ConfigError, WorkloadError
from kvlab.lab.advise.advice import PLAN, Figures, Proposal, unkept
from kvlab.lab.advise.adviser import Adviser
from kvlab.lab.advise.changes import Change, Price, TrafficFacts
from kvlab.lab.advise.goal import Gain, Goal, Kind
from kvlab.lab.advise.headroom import summary
from kvlab.lab.advise.search import Search, Tried, ranked
from kvlab.lab.advise.segments import Segment, alone, halves
from kvlab.lab.advise.settings import AdviseSettings
from kvlab.lab.advise.simulations import Outcome, Simulations
from kvlab.lab.advise.text import _others
from kvlab.simulation.accuracy import PAIRS
from tests.support.plans import composed

TRACE = WorkloadConfig(name="mine", source="recorded", path="mine.jsonl", arrival="trace")


def outcome(e2el_ms: Sequence[float], **metrics: float) -> Outcome:
    values = np.array(e2el_ms, dtype=float)
    return Outcome({"ttft": values / 10, "tpot": values / 100, "e2el": values}, metrics, 1)


def goal(kind: Kind, **limits: float) -> Goal:
    return Goal(kind, limits, PAIRS["vllm", False])


def requests(count: int, per_s: float = 1.0, turns: int = 1) -> list[Request]:
    sampling = SamplingParams(10)
    first = [Request(f"r{number}", (1, 2), sampling, number / per_s) for number in range(count)]
    later = [
        Request(
            f"r{number}.{turn}", (3,), sampling, 0.5, follows=f"r{number}" if turn == 1 else f"r{number}.{turn - 1}"
        )
        for number in range(count)
        for turn in range(1, turns)
    ]
    return first + later


def test_the_rate_of_conversations_is_not_told_as_that_of_requests() -> None:
    alone, turns = (summary(WorkloadConfig(name="drawn"), requests(11, 2.0, turns)).sentence() for turns in (1, 4))
    assert alone.startswith("11 requests, 2 a second over 5 s (gaps vary 0.00 times their mean); prompts of ")
    assert turns.startswith("44 requests in 11 conversations, which begin 2 a second over 5 s (gaps vary 0.00 ")


class TestErrorsOfPairs:
    """The published errors of predicted ratios are those of the experiment's rows."""

    @pytest.mark.parametrize(("framework", "is_sparse"), PAIRS)
    def test_are_computed_from_measured_deployments(self, framework: str, is_sparse: bool) -> None:
        groups: dict[tuple[object, ...], list[tuple[float, float]]] = {}
        for row in results():
            if (row.framework, row.is_sparse) == (framework, is_sparse):
                pair = [
                    getattr(row, f"{by}_ttft_ms") + (row.output - 1) * getattr(row, f"{by}_tpot_ms") for by in BY
                ]
                key = row.campaign, row.device, row.weights, row.prompt, row.output
                groups.setdefault(key, []).append((pair[0], pair[1]))
        pairs = [pair for rows in groups.values() for pair in itertools.combinations(rows, 2)]
        ratios = [[math.log(first[by] / second[by]) for by in (0, 1)] for first, second in pairs]
        errors = [abs(measured - simulated) for measured, simulated in ratios]
        right = [(measured > 0) == (simulated > 0) for measured, simulated in ratios]
        found = PAIRS[framework, is_sparse]
        assert found.pairs == len(pairs)
        assert found.half == pytest.approx(np.percentile(errors, 50), abs=6e-4)
        assert found.most == pytest.approx(np.percentile(errors, 90), abs=6e-4)
        assert found.direction == pytest.approx(np.mean(right), abs=6e-4)


BY = ("measured", "simulated")


class TestGain:
    def test_of_half_the_time_is_50_percent_with_the_error_of_ratios(self) -> None:
        gain = goal(Kind.LATENCY).gain(outcome([100.0] * 40), outcome([50.0] * 40))
        half = PAIRS["vllm", False].half
        assert gain.value == pytest.approx(50)
        assert gain.low == pytest.approx(100 * (1 - 0.5 * math.exp(half)))
        assert gain.high == pytest.approx(100 * (1 - 0.5 * math.exp(-half)))
        assert gain.verdict == "better"

    def test_within_the_error_of_ratios_is_no_difference(self) -> None:
        before = outcome([100.0] * 40)
        assert goal(Kind.LATENCY).gain(before, outcome([97.0] * 40)).verdict == "no difference"
        assert goal(Kind.LATENCY).gain(before, outcome([110.0] * 40)).verdict == "worse"

    def test_of_a_few_requests_in_one_place_is_uncertain(self) -> None:
        even = goal(Kind.LATENCY).gain(outcome([100.0] * 40), outcome([90.0] * 40))
        few = goal(Kind.LATENCY).gain(outcome([100.0] * 40), outcome([20.0] * 5 + [100.0] * 35))
        assert even.value == pytest.approx(few.value)
        assert few.high - few.low > 1.5 * (even.high - even.low)

    def test_in_service_levels_is_in_points_and_knows_how_near_the_limit_is(self) -> None:
        levels = goal(Kind.LEVELS, ttft=10.0)
        before = outcome([200.0] * 20 + [50.0] * 20)
        clear, narrow = (levels.gain(before, outcome([value] * 40)) for value in (50.0, 99.0))
        assert clear.value == narrow.value == 50
        assert clear.low > narrow.low  # 4 % more would put all of the second over the limit
        assert clear.verdict == "better"
        assert levels.holds(outcome([99.0] * 99 + [101.0]))
        assert not levels.holds(outcome([99.0] * 98 + [101.0] * 2))

    def test_a_request_that_did_not_end_keeps_no_limit(self) -> None:
        assert goal(Kind.LEVELS, tpot=10.0).share_within(outcome([100.0, math.nan])) == 0.5

    def test_seen_twice_has_both_intervals_and_half_of_what_they_are_apart(self) -> None:
        assert Gain(10, 5, 15).joined(Gain(10, -1, 12)) == Gain(10, -1, 15)
        assert Gain(10, 5, 15).joined(Gain(4, -1, 6)) == Gain(10, -4, 18)


class TestLimitsThatThePlanDoesNotKeep:
    """The plan was chosen on one part; what is said is of the other."""

    @staticmethod
    def said(within: float) -> str:
        limits, gain = {"tpot": 10.0}, Gain(1, 0.5, 2)
        figures = Figures.of(outcome([1200.0] * 20), goal(Kind.LEVELS, **limits), None)
        plan = Proposal(PLAN, ("a=1",), gain, gain, figures, "nothing", "")
        other = Proposal("kind", ("b=2",), gain, gain, replace(figures, within=within), "quality", "")
        return unkept(plan, [other], limits)

    def test_a_single_change_may(self) -> None:
        assert self.said(0.995) == "b=2 alone keeps the limits for 99 % (costs quality), the plan does not."

    def test_else_limits_that_it_would_keep(self) -> None:
        said = self.said(0.98)
        assert said.startswith("Nothing that was tried keeps the limits for 99 %; slo.tpot_ms=12 would be kept")


def test_a_plan_whose_gains_differ_by_more_than_they_are_is_none_and_is_named() -> None:
    class Fake:
        @staticmethod
        def run(settings: list[dict[str, int]], segment: str) -> list[Outcome]:
            ms = {"first": 100.0, "second": 900.0}[segment]
            return [outcome([ms if each else 1000.0] * 20) for each in settings]

    adviser: Any = object.__new__(Adviser)
    adviser.simulations, adviser.goal, adviser.settings = Fake, goal(Kind.LATENCY), AdviseSettings()
    adviser.first, adviser.second, adviser.words = "first", "second", []
    proposals, planned, uneven = adviser._proposals([], {"a": Change("a", {"kv.block_size": 32})})
    assert (proposals, planned.settings) == ([], ())
    assert uneven.settings == ("kv.block_size=32",)
    assert uneven.again.verdict == "better"
    assert uneven.seen.low < 0


def test_what_is_listed_in_part_says_how_many_more_there_are() -> None:
    class Fake:
        no_difference, worse = tuple("abcdefgh"), ("x",)
        not_tried = tuple((name, "refused") for name in "abcdefg")

    fake: Any = Fake
    same, worse, *_, last, more = _others(fake)
    assert same == "no difference: a, b, c, d, e, f, and 2 more, in advice.html"
    assert worse == "worse: x"
    assert (last, more) == ("not tried: f: refused", "not tried: and 1 more, in advice.html")


def test_commands_that_try_a_change_hide_secrets_and_drop_what_it_replaces() -> None:
    gain, figures = Gain(1, 0.5, 2), Figures.of(outcome([1200.0] * 20), goal(Kind.LATENCY), None)
    words = ["hardware=l4", "kv.block_size=32", "tracking.uri=https://me:hunter22@store"]
    changes = [Change("a", {"kv.block_size": 16}), Change("b", {"kv.windows": True}, cost="much")]
    plan = Proposal.of(PLAN, changes, gain, gain, figures, words)
    assert plan.command == (
        "kvlab run hardware=l4 'tracking.uri=https://***@store' kv.block_size=16 kv.windows=true"
    )
    assert plan.cost == "much"


class TestHalves:
    def test_are_before_and_behind_the_middle_of_the_time(self) -> None:
        first, second = halves(TRACE, requests(40, per_s=2.0), None, 100)
        assert [each.request_id for each in first.requests] == [f"r{number}" for number in range(20)]
        assert first.seconds == (0.0, 9.5)
        assert second.requests[0].arrival_s == 0.0
        assert len(second.requests) == 20

    def test_keep_conversations_whole(self) -> None:
        for segment in halves(TRACE, requests(30, turns=3), None, 30):
            known = set[str]()
            for request in segment.requests:
                assert request.follows is None or request.follows in known
                known.add(request.request_id)
            assert len(known) % 3 == 0

    def test_of_long_traces_are_busy_windows_whose_first_requests_do_not_count(self) -> None:
        sampling = SamplingParams(10)
        busy = [Request(f"b{n}", (1,) * (100 if 300 <= n < 400 else 2), sampling, float(n)) for n in range(1000)]
        first, _ = halves(TRACE, busy, None, 50)
        assert len(first.requests) == 50
        start, end = first.seconds or (0, 0)
        assert 250 <= start < end <= 450
        assert len(first.counted) == 50 - int(0.15 * 50)
        assert first.requests[0].request_id not in first.counted

    def test_of_drawn_requests_are_two_draws(self) -> None:
        drawn = WorkloadConfig(name="drawn")
        again = requests(30, per_s=3.0)
        _, second = halves(drawn, requests(30), again, 100)
        assert second.requests == again

    def test_of_a_trace_in_one_place_are_refused(self) -> None:
        late = [*requests(30, per_s=1000.0), Request("last", (1,), SamplingParams(1), 1000.0)]
        with pytest.raises(WorkloadError, match="too few requests in one half of its 1e"):
            halves(TRACE, late, None, 100)

    def test_alone_each_conversation_has_the_devices_to_itself(self) -> None:
        segment, _ = halves(TRACE, requests(60, turns=2), None, 1000)
        found = alone(segment, 10)
        starts = [each.arrival_s for each in found.requests if each.follows is None]
        assert np.diff(starts).min() >= 86_400
        assert sum(each.follows is not None for each in found.requests) == len(starts)


def test_of_gains_that_are_nearly_the_same_the_cheapest_is_first() -> None:
    def tried(name: str, gain: float, price: Price) -> Tried:
        return Tried(Change(name, {name: 1}, price), outcome([]), Gain(gain, gain, gain))

    found = ranked(
        [
            tried("devices", 50, Price.DEVICES),
            tried("budget", 46, Price.NOTHING),
            tried("router", 30, Price.NOTHING),
            tried("worse", -5, Price.NOTHING),
            Tried(Change("cannot", {}), outcome([]), None, "does not fit"),
        ]
    )
    assert [single.change.kind for single in found] == ["budget", "devices", "router", "worse", "cannot"]


KEYS = {
    "batch": "scheduler.max_batch_size",
    "budget": "scheduler.max_batched_tokens",
    "order": "scheduler.order",
}


class Told(Simulations):
    """Simulations whose requests take as long as `times_ms` says of the kinds that are changed."""

    def __init__(self, times_ms: dict[frozenset[str], float]) -> None:
        self.config, self._times_ms = composed("executor=simulated", "hardware=l4"), times_ms
        self.kinds: list[frozenset[str]] = []  # of each simulation that was asked for

    def run(self, settings: Iterable[Mapping[str, Any]], segment: Segment) -> list[Outcome]:
        kinds = [frozenset(kind for kind, key in KEYS.items() if key in values) for values in settings]
        self.kinds += kinds
        times_ms = [self._times_ms.get(changed, 100.0) for changed in kinds]
        return [Outcome(error="cannot run") if math.isnan(ms) else outcome([ms] * 40) for ms in times_ms]


class Chosen(Search):
    """A search among one change of each kind."""

    def _possible(self, config: Any) -> list[Change]:
        values = {"batch": 7, "budget": 777, "order": "fcfs"}
        return [Change(kind, {KEYS[kind]: values[kind]}) for kind in KEYS]


def searched(times_ms: dict[tuple[str, ...], float], trials: int) -> tuple[set[str], Told]:
    segment, _ = halves(TRACE, requests(40), None, 1000)
    told = Told({frozenset(kinds): time for kinds, time in times_ms.items()})
    facts = TrafficFacts(False, False, False, None, 0, False, 2048)
    search = Chosen(told, segment, goal(Kind.LATENCY), facts, 1)
    return set(search.plan(search.singles(), trials)), told


def best_plan(times_ms: dict[tuple[str, ...], float], trials: int = 24) -> set[str]:
    return searched(times_ms, trials)[0]


class TestThePlan:
    def test_is_nothing_where_no_change_is_better(self) -> None:
        assert best_plan({("batch",): 99.0, ("order",): 150.0}) == set()

    def test_has_what_is_better_on_top_of_the_best(self) -> None:
        assert best_plan({("batch",): 60.0, ("budget",): 70.0, ("batch", "budget"): 30.0}, 0) == {"batch", "budget"}

    def test_has_combinations_of_which_no_part_is_the_best_alone(self) -> None:
        times = {("batch",): 60.0, ("budget",): 80.0, ("order",): 80.0, ("budget", "order"): 20.0}
        assert best_plan(times, 0) == {"batch"}
        assert best_plan(times) == {"budget", "order"}

    @pytest.mark.parametrize("best", [*itertools.combinations(KEYS, 2), tuple(KEYS)])
    def test_is_the_best_of_all_combinations_that_were_tried(self, best: tuple[str, ...]) -> None:
        """Whenever its turn comes: each of the others is better than the best alone."""
        others: list[tuple[str, ...]] = [*itertools.combinations(KEYS, 2), tuple(KEYS)]
        assert best_plan({("batch",): 60.0, **dict.fromkeys(others, 40.0), best: 20.0}) == set(best)

    @pytest.mark.parametrize("trials", [2, 4, 1000])
    def test_is_chosen_among_so_many_combinations_that_are_not_known(self, trials: int) -> None:
        """Of the eight of three changes, four are of two or three."""
        _, told = searched({("batch",): 60.0}, 0)
        before = set(told.kinds)
        _, told = searched({("batch",): 60.0}, trials)
        assert len(set(told.kinds) - before) == min(trials, 8 - len(before))

    def test_combinations_that_cannot_run_do_not_count(self) -> None:
        times = {("batch",): 60.0, ("batch", "order"): math.nan, ("budget", "order"): 20.0}
        assert best_plan(times, 3) == {"budget", "order"}

    def test_leaves_out_what_gains_nothing_beside_the_others(self) -> None:
        times = {("batch",): 60.0, ("budget",): 70.0, ("order",): 80.0, ("batch", "budget"): 30.0}
        every = ("batch", "budget", "order")
        assert best_plan(times | {every: 10.0}, 0) == set(every)
        assert best_plan(times | {every: 10.0, ("budget", "order"): 10.0}, 0) == {"budget", "order"}


def test_todays_settings_are_read_as_one_types_them(tmp_path: Path) -> None:
    file = tmp_path / "today.yaml"
    file.write_text("hardware: l4\nkv.prefix_sharing: false\nscheduler: {max_batch_size: 8}\nkv.memory: null\n")
    words = ["hardware=l4", "kv.prefix_sharing=false", "scheduler.max_batch_size=8", "kv.memory=null"]
    assert current_words(str(file)) == words
    with pytest.raises(ConfigError, match="name a YAML file of settings"):
        current_words(str(tmp_path))


def test_a_layout_that_nobody_gave_has_room_for_the_longest_request() -> None:
    settings = AdviseSettings(devices=4)
    asked = ["hardware=h100_sxm", "model=llama3_1_70b", "executor.weights=fp8", "workload=documents"]
    words = words_of(settings, [*asked, "workload.num_requests=20"])
    config, _, said = compose_today(settings, words)  # on one device fewer than 2,500 tokens are left
    assert (config.fleet.replicas, config.executor.tensor_parallel) == (2, 2)
    assert "2 replicas of 2 device(s)" in said
