"""Advice on groups of unequal replicas: what is simulated is what its command runs, within the devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from kvlab.cli.advise import compose_today, current_words
from kvlab.config import RunConfig
from kvlab.config.groups import with_settings
from kvlab.lab.advise.changes import TrafficFacts, possible_changes
from kvlab.lab.advise.parts import Part, changed, devices_of, parts_of
from kvlab.lab.advise.search import Search
from kvlab.lab.advise.settings import AdviseSettings
from kvlab.lab.settings import as_word
from tests.support.plans import compose_run

SPLIT = "{role:decode,count:3,executor.tensor_parallel:2},{role:prefill,count:2,hardware:l40s}"
UNEQUAL = "{count:2,name:one},{count:3,hardware:l40s,executor.tensor_parallel:2},{count:1,kv.num_blocks:500}"
FACTS = TrafficFacts(
    shares=True, misses=True, preempts=False, best_eviction=None, salts=0, pins=False, most_running=2048
)


@pytest.mark.parametrize("groups", [SPLIT, UNEQUAL])
@pytest.mark.parametrize("more", [0, 1, 16])
def test_what_is_simulated_is_what_the_command_runs(groups: str, more: int) -> None:
    typed = ["executor=simulated", "hardware=h100_sxm", f"fleet.groups=[{groups}]", "fleet.router=precise"]
    config, words, _ = compose_today(AdviseSettings(), typed)
    most = devices_of(config) + more
    changes = possible_changes(config, FACTS, most)
    kinds = {change.kind for change in changes}
    assert kinds >= {"replicas of groups", "router", "neighbours", "shared store", "type of K and V", "order"}
    assert kinds >= {f"sequences of a step, fleet.groups.{number}" for number, _ in enumerate(config.fleet.groups)}
    one_of_each = {(change.kind, frozenset(change.keys)): change for change in changes}.values()
    layouts = [change for change in changes if change.kind == "replicas of groups"]  # with 16 more all those with 0
    for change in {0: [], 1: one_of_each, 16: layouts}[more]:
        assert _served(changed(config, change.settings)) == _served(compose_run(*words, *change.text.split()))
    assert max(devices_of(changed(config, change.settings)) for change in changes) == most


def _served(config: RunConfig) -> object:
    """What replicas have, however it is written; a group without a name is called by what it has of its own."""
    alone = replace(config, fleet=replace(config.fleet, groups=[]))
    return alone, [(part[1:3], with_settings(alone, part.settings)) for part in config.fleet.parts]


def test_what_a_group_has_of_its_own_is_changed_for_the_others() -> None:
    groups = "fleet.groups=[{count:2},{count:1,kv.dtype:fp8_e4m3,scheduler.max_batch_size:64}]"
    config, words, _ = compose_today(AdviseSettings(), ["hardware=h100_sxm", groups])
    changes = possible_changes(config, FACTS, 8)
    types = [change for change in changes if "kv.dtype" in change.settings]
    assert [change.settings for change in types] == [{"kv.dtype": "fp8_e4m3"}, {"kv.dtype": "int8"}]
    assert all(change.cost.endswith(" (of h100_sxm alone)") for change in types)
    assert _served(changed(config, types[1].settings)) == _served(compose_run(*words, types[1].text))
    batches = [change.settings for change in changes if change.kind == "sequences of a step, fleet.groups.1"]
    assert {"fleet.groups.1.scheduler.max_batch_size": 128} in batches
    changes = possible_changes(config, replace(FACTS, most_running=63), 8)
    batches = [change.settings for change in changes if change.kind == "sequences of a step, fleet.groups.1"]
    assert batches == [{"fleet.groups.1.scheduler.max_batch_size": most} for most in (32, 16)]


def test_nothing_is_changed_that_all_groups_have_of_their_own() -> None:
    """Also as the run has it."""
    groups = "fleet.groups=[{count:2,kv.dtype:auto,kv.block_size:8},{count:1,kv.dtype:fp8_e4m3,kv.block_size:16}]"
    config, _, _ = compose_today(AdviseSettings(), ["hardware=h100_sxm", "kv.num_blocks=900", groups])
    changes = possible_changes(config, FACTS, 8)
    assert not any("kv.dtype" in change.settings or "kv.block_size" in change.settings for change in changes)


@pytest.mark.parametrize("blocks", ["kv.num_blocks=900", "seed=0"])
def test_blocks_of_another_size_take_the_same_memory_in_each_group(blocks: str) -> None:
    groups = (
        "{count:1},{count:1,kv.num_blocks:500},{count:1,kv.block_size:8},{count:1,kv.block_size:8,kv.num_blocks:80}"
    )
    words = ["hardware=h100_sxm", blocks, f"fleet.groups=[{groups}]"]
    config, words, _ = compose_today(AdviseSettings(), words)
    changes = [change for change in possible_changes(config, FACTS, 8) if "kv.block_size" in change.settings]
    assert [change.settings["kv.block_size"] for change in changes] == [32, 64]
    today = [_tokens(part) for part in parts_of(config)]
    for change in changes:
        there = changed(config, change.settings)
        assert [part.kv.block_size for part in parts_of(there)] == [change.settings["kv.block_size"]] * 2 + [8, 8]
        assert [_tokens(part) for part in parts_of(there)] == pytest.approx(today, abs=63)
        assert _served(there) == _served(compose_run(*words, *change.text.split()))


def _tokens(part: Part) -> int:
    """That its blocks hold; 0: it was given no number of them."""
    return (part.kv.num_blocks or 0) * part.kv.block_size


@pytest.mark.parametrize("key", ["scheduler", "scheduler.max_batch_size"])
def test_what_is_kept_stays_in_groups_too(key: str) -> None:
    config, _, _ = compose_today(AdviseSettings(), ["hardware=l4", f"fleet.groups=[{SPLIT}]"])
    search: Any = object.__new__(Search)
    search.facts, search.devices, search.kept = FACTS, 16, [key]
    assert not any(key in setting for change in search._possible(config) for setting in change.settings)


@pytest.mark.parametrize(("keep", "kept"), [("fleet.groups", {0, 1}), ("fleet.groups.1.count", {1})])
def test_counts_that_are_kept_stay(keep: str, kept: set[int]) -> None:
    config, _, _ = compose_today(AdviseSettings(), ["executor=simulated", "hardware=l4", f"fleet.groups=[{SPLIT}]"])
    search: Any = object.__new__(Search)
    search.facts, search.devices, search.kept = FACTS, 16, [keep]
    changed_keys = {key for change in search._possible(config) for key in change.settings}
    assert {number for number in (0, 1) if f"fleet.groups.{number}.count" not in changed_keys} == kept


def test_settings_that_follow_from_the_groups_are_left_to_them() -> None:
    """Or a change of a count would contradict them."""
    typed = ["executor=simulated", "hardware=l4", f"fleet.groups=[{SPLIT}]", "fleet.replicas=5", "fleet.prefill=2"]
    assert compose_today(AdviseSettings(), typed)[1] == typed[:3]


def test_a_group_without_a_count_has_the_one_that_others_leave() -> None:
    """In the order of the command line, where those that prefill may be behind."""
    typed = ["executor=simulated", "hardware=l4", "fleet.groups=[{role:decode},{role:prefill}]", "fleet.replicas=5"]
    config, words, _ = compose_today(AdviseSettings(), typed)
    assert words == [*typed[:3], "fleet.groups.1.count=1", "fleet.groups.0.count=4"]
    assert config.fleet.replicas == 5


def test_groups_of_a_file_are_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "today.yaml"
    file.write_text("fleet: {groups: [{count: 2, name: it's a, kv: {windows: true}}, {count: 1, kv.dtype: int8}]}")
    words = current_words(str(file))
    config = compose_run("executor=simulated", "hardware=l4", *words)
    assert config.fleet.names == ["it's a", "it's a", "dtype=int8"]
    assert words == ['fleet.groups=[{count:2,name:"it\'s a",kv:{windows:true}},{count:1,kv.dtype:int8}]']


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (["900:die:0", "9.5:drain:1"], "x=[900:die:0,9.5:drain:1]"),
        ([{"hardware": "l40s", "name": 'a "b"'}], 'x=[{hardware:l40s,name:"a \\"b\\""}]'),
        (
            ["1e5", "true", "NULL", "nan", "", "a b", "64GiB", "é"],
            'x=["1e5","true","NULL","nan","","a b",64GiB,"é"]',
        ),
        ([1e5, 1, True, None], "x=[100000.0,1,true,null]"),
    ],
)
def test_a_list_is_typed_with_the_fewest_quotes(value: list[object], word: str) -> None:
    assert as_word("x", value) == word
    assert OverridesParser.create().parse_override(word).value() == value


@pytest.mark.parametrize(
    ("today", "change"),
    [
        ((), {"kv.quota": 0.5}),
        ((), {"kv.eviction": "lfu"}),
        (("kv.eviction=lfu",), {"kv.eviction": "lru"}),
        (("kv.merge_equal=true",), {"kv.eviction": "lfu"}),
        (("framework=sglang",), {"kv.eviction": "lfu"}),
    ],
)
def test_equal_blocks_stay_where_the_command_keeps_them(today: tuple[str, ...], change: dict[str, Any]) -> None:
    config, words, _ = compose_today(AdviseSettings(), ["hardware=h100_sxm", *today])
    command = compose_run(*words, *(f"{key}={value}" for key, value in change.items()))
    assert _served(changed(config, change)) == _served(command)
