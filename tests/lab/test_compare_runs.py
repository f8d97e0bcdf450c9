"""Groups, equal work, equal outputs and the gate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlab.errors import ConfigError, RecordError
from kvlab.lab.compare.gate import check, parse_conditions
from kvlab.lab.compare.groups import RunSet, group_runs, pairs_of
from kvlab.lab.compare.interval import estimate
from kvlab.lab.compare.work import check_groups, check_outputs, obstacle
from kvlab.lab.results.records import read_run, read_sweep
from tests.support.recorded import THROUGHPUT, record_run, record_sweep

POINTS = {"contiguous": {"kv__backend": "contiguous"}, "paged": {}}
RATES = {"contiguous": [100.0, 90.0, 95.0], "paged": [110.0, 99.0, 104.0]}


@pytest.fixture
def sweep(tmp_path):
    return RunSet("sweep", tuple(record_sweep(tmp_path / "sweep", POINTS, RATES)))


def test_repeats_of_a_configuration_are_a_group_and_are_paired_in_turns(sweep):
    first, second = group_runs([sweep])
    assert (first.name, second.name) == ("kv=contiguous", "kv=paged")
    assert first.values(THROUGHPUT) == RATES["contiguous"]
    pairs = pairs_of(first, second)
    assert [(a.metrics[THROUGHPUT], b.metrics[THROUGHPUT]) for a, b in pairs] == [(100, 110), (90, 99), (95, 104)]


def test_names_tags_and_tracking_do_not_make_a_configuration(tmp_path):
    runs = [
        record_run(tmp_path / str(number), run_name=f"run {number}", tracking__uri=str(number), figures=number > 1)
        for number in range(3)
    ]
    assert len(group_runs([RunSet("all", tuple(runs))])) == 1


def test_runs_of_a_plugin_that_was_edited_are_no_repeats(tmp_path):
    runs = [record_run(tmp_path / str(number)) for number in range(3)]
    edited = [replace(run, facts={"plugins": {"mine": code}}) for run, code in zip(runs, "aab", strict=True)]
    groups = group_runs([RunSet("all", tuple(edited))])
    assert [(group.name, len(group.runs)) for group in groups] == [("plugins.mine=a", 2), ("plugins.mine=b", 1)]


def test_a_sweep_that_failed_in_part_pairs_the_repeats_that_both_have(tmp_path):
    record_sweep(tmp_path, POINTS, RATES)
    record_run(tmp_path / "3", status="out_of_memory", error="does not fit", repeat=1)
    first, second = group_runs([RunSet("sweep", tuple(read_sweep(tmp_path)))])
    assert (len(second.runs), len(second.left_out)) == (2, 1)
    assert len(pairs_of(first, second)) == 2


def test_sweeps_of_the_same_points_are_compared_with_each_other(tmp_path):
    sets = [RunSet(n, tuple(record_sweep(tmp_path / n, {"paged": {}}, {"paged": RATES["paged"]}))) for n in "ab"]
    groups = group_runs(sets)
    assert [group.name for group in groups] == ["a", "b"]
    assert pairs_of(*groups) == []  # they did not run in turns
    several = [RunSet(n, tuple(record_sweep(tmp_path / n, POINTS, RATES))) for n in "cd"]
    groups = group_runs(several)
    assert [group.name for group in groups] == ["c", "d"]
    assert len(pairs_of(*groups)) == 6  # point by point
    assert obstacle(groups[0], groups[1]) is None


def test_by_compares_what_it_names_within_all_else(tmp_path):
    points = {f"{kv}{size}": {"kv__backend": kv, "kv__block_size": size} for kv in POINTS for size in (8, 16)}
    runs = record_sweep(tmp_path, points, {name: [100.0, 101.0] for name in points})
    groups = group_runs([RunSet("sweep", tuple(runs))], ("kv.backend",))
    assert [group.name for group in groups] == ["kv.backend=contiguous", "kv.backend=paged"]
    pairs = pairs_of(*groups)
    assert len(pairs) == 4
    assert all(a.config["kv.block_size"] == b.config["kv.block_size"] for a, b in pairs)
    assert [group.name for group in group_runs([RunSet("s", tuple(runs))], ("kv",))] == [
        "kv=contiguous",
        "kv=paged",
    ]


@pytest.mark.parametrize(("machine", "pairs"), [("a CPU", 6), ("simulated l4, timing roofline", 2)])
def test_among_other_points_a_simulation_and_its_repeats_are_one(tmp_path, machine, pairs):
    """Copies of a pair make its interval too short."""
    points = {
        f"{kv}{size}": {"kv__backend": kv, "kv__block_size": size, "facts": {"machine": machine}}
        for kv in POINTS
        for size in (8, 16)
    }
    rates = {name: [100.0 + len(name)] * 3 for name in points}
    runs = RunSet("sweep", tuple(record_sweep(tmp_path, points, rates)))
    assert len(pairs_of(*group_runs([runs], ("kv.backend",)))) == pairs
    assert [len(group.runs) for group in group_runs([runs])] == [3, 3, 3, 3]


def test_a_choice_stands_for_what_it_decides_and_for_nothing_else(tmp_path):
    points = {f"{kv}{size}": {"kv__backend": kv, "kv__block_size": size} for kv in POINTS for size in (8, 16)}
    runs = record_sweep(tmp_path, points, {name: [1.0] for name in points})
    names = [group.name for group in group_runs([RunSet("sweep", tuple(runs))])]
    assert names[0] == "kv=contiguous kv.block_size=8"
    assert len(set(names)) == 4


def test_a_tag_separates_groups_of_one_configuration(tmp_path):
    points = {side: {"tags": {"side": side}} for side in ("a", "b")}
    runs = record_sweep(tmp_path, points, {"a": [1.0, 2.0], "b": [1.0, 2.0]})
    groups = group_runs([RunSet("sweep", tuple(runs))], ("tags.side",))
    assert [group.name for group in groups] == ["tags.side=a", "tags.side=b"]
    assert len(pairs_of(*groups)) == 2


def test_a_key_that_no_run_has_is_reported_with_those_near_it(sweep):
    with pytest.raises(ConfigError, match=r"by=kv\.backnd: no run has this key; near it: kv\.backend"):
        group_runs([sweep], ("kv.backnd",))


@pytest.mark.parametrize(
    ("settings", "facts", "reason"),
    [
        ({"kv__backend": "contiguous"}, {}, None),
        ({"model__max_seq_len": 2048}, {}, None),
        ({"workload__name": "other"}, {}, None),
        ({"model__architecture__hidden_size": 128}, {}, "model.architecture.hidden_size"),
        ({"workload__num_requests": 3}, {"workload_digest": "d1"}, "workload.num_requests"),
        ({"seed": 1}, {"workload_digest": "d1"}, "seed"),
        ({}, {"workload_digest": "d1"}, "workload.path"),
        ({"workload__num_requests": 3}, {"workload_digest": None}, "workload.num_requests"),
    ],
)
def test_other_work_is_an_obstacle_that_names_its_keys(tmp_path, settings, facts, reason):
    runs = [record_run(tmp_path / "a"), record_run(tmp_path / "b", facts=facts, **settings)]
    groups = group_runs([RunSet(run.name, (run,)) for run in runs])
    found = obstacle(groups[0], groups[1])
    assert found == reason if reason is None else reason in (found or "")
    if "workload__num_requests" in settings:
        assert obstacle(groups[0], groups[1], by=("workload.num_requests",)) is None
        assert obstacle(groups[0], groups[1], by=("workload",)) is None


def test_groups_of_unlike_runs_are_refused_unless_they_pair(tmp_path):
    sizes = {"contiguous": (8, 16), "paged": (8, 32)}
    runs = [
        record_run(tmp_path / f"{kv}{size}", kv__backend=kv, kv__block_size=size)
        for kv, both in sizes.items()
        for size in both
    ]
    groups = group_runs([RunSet("s", tuple(runs))], ("kv.backend",))
    assert "kv.block_size" in (obstacle(groups[0], groups[1], by=("kv.backend",)) or "")


def test_outputs_are_equal_or_the_first_difference_is_reported(tmp_path):
    first = record_run(tmp_path / "a")
    assert check_outputs(first, record_run(tmp_path / "b")).text == "equal for 2 requests"
    other = record_run(tmp_path / "c", tokens={"r0": [1, 2, 3], "r1": [4, 6]})
    assert check_outputs(first, other).text == "differ for 1 of 2 requests (first: request r1, token 1)"
    shorter = record_run(tmp_path / "d", tokens={"r0": [1, 2], "r1": [4, 5]})
    assert check_outputs(first, shorter).text == "differ for 1 of 2 requests (first: request r0, token 2)"
    part = record_run(tmp_path / "e", tokens={"r0": [1, 2, 3]})
    assert check_outputs(first, part) == (False, "equal for 1 requests; 1 in one of the runs alone")


@pytest.mark.parametrize(
    ("settings", "facts", "reason"),
    [
        ({"workload__temperature": 0.7}, {}, "sampled"),
        ({"model__weights": "elsewhere"}, {}, "model.weights"),
        ({"seed": 1}, {}, "seed"),
        ({}, {"workload_digest": "d1"}, "other workload"),
    ],
)
def test_outputs_that_need_not_be_equal_are_not_compared(tmp_path, settings, facts, reason):
    found = check_outputs(record_run(tmp_path / "a"), record_run(tmp_path / "b", facts=facts, **settings))
    assert not found.equal
    assert found.text.startswith("not comparable")
    assert reason in found.text


def test_one_repeat_with_other_outputs_is_found(sweep, tmp_path):
    first, second = group_runs([sweep])
    assert check_groups(first, second).equal
    record_run(tmp_path / "sweep" / "5", tokens={"r0": [9], "r1": [4, 5]}, repeat=2)
    first, second = group_runs([RunSet("sweep", tuple(read_sweep(tmp_path / "sweep")))])
    assert check_groups(first, second).text.startswith("differ")


def test_conditions_are_read():
    slower, late = parse_conditions(f"{THROUGHPUT} < -5%, latency/ttft_ms_p99 >= 500")
    assert (slower.metric, slower.operator, slower.limit, slower.relative) == (THROUGHPUT, "<", -0.05, True)
    assert (late.metric, late.operator, late.limit, late.relative) == ("latency/ttft_ms_p99", ">=", 500, False)
    for text in (f"{THROUGHPUT} -5%", f"{THROUGHPUT} < fast", "< 5", f"{THROUGHPUT} == 5"):
        with pytest.raises(ConfigError, match="fail_if="):
            parse_conditions(text)


@pytest.mark.parametrize(
    ("text", "violated", "said"),
    [
        (f"{THROUGHPUT} < -5%", False, "within the limit"),
        (f"{THROUGHPUT} > 5%", True, "+10.0 %, beyond the limit"),
        (f"{THROUGHPUT} > 9.9%", True, "has the limit within it"),
        (f"{THROUGHPUT} < 50", False, "is 104"),
        ("duration_s > 5", True, "duration_s of kv=paged is 9.61538, beyond the limit"),
    ],
)
def test_a_condition_is_decided_by_the_median(sweep, text, violated, said):
    first, second = group_runs([sweep])
    (condition,) = parse_conditions(text)
    pairs = [(a.metrics[condition.metric], b.metrics[condition.metric]) for a, b in pairs_of(first, second)]
    found = estimate(first.values(condition.metric), second.values(condition.metric), pairs=pairs)
    finding = check(condition, first, second, found)
    assert finding.violated is violated
    assert said in finding.sentence


def test_a_gate_does_not_pass_what_it_has_not_seen(tmp_path):
    runs = [record_run(tmp_path / "a"), record_run(tmp_path / "b", status="failed", kv__backend="contiguous")]
    first, second = group_runs([RunSet("all", tuple(runs))])
    (condition,) = parse_conditions(f"{THROUGHPUT} < -5%")
    finding = check(condition, first, second, None)
    assert finding.violated
    assert "none of its runs finished (failed)" in finding.sentence


def test_a_record_reads_what_an_older_version_wrote(tmp_path):
    (tmp_path / "summary.json").write_text('{"name": "old", "metrics": {"duration_s": 2}}')
    (tmp_path / "config.yaml").write_text("kv:\n  backend: paged\ntags:\n  x: y\nseed: 3\n")
    run = read_run(tmp_path)
    assert run.config == {"kv.backend": "paged", "tags.x": "y", "seed": 3}
    assert (run.finished, run.tags, list(run.steps()), run.requests()) == (True, {"x": "y"}, [], [])


def test_what_is_no_run_is_reported(tmp_path):
    with pytest.raises(RecordError, match=r"no run's output directory"):
        read_run(tmp_path)
    with pytest.raises(RecordError, match=r"no sweep's directory"):
        read_sweep(tmp_path)
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(RecordError, match=r"summary\.json: cannot be read"):
        read_run(tmp_path)
    record_run(tmp_path)
    (tmp_path / "requests.parquet").write_text("nothing")
    with pytest.raises(RecordError, match=r"requests\.parquet: cannot be read"):
        read_run(tmp_path).requests()


def test_a_run_whose_settings_are_too_long_for_a_name_is_its_directory(tmp_path):
    runs = [record_run(tmp_path / f"{n}", fleet__groups=[{"count": n, "name": "a" * 300}]) for n in (1, 2)]
    names = [group.name for group in group_runs([RunSet("both", tuple(runs))])]
    assert names == [str(tmp_path / "1"), str(tmp_path / "2")]
