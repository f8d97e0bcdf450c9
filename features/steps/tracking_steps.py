"""Steps about what a tracked run says of itself."""

from __future__ import annotations

import json

from pytest_bdd import parsers, then

from tests.support.commands import Command


@then(parsers.parse('the tracked run\'s input is the workload "{name}" with the digest of summary.json'))
def workload_is_input(commands: list[Command], name: str) -> None:
    (given,) = commands[-1].tracked.inputs.dataset_inputs
    assert given.dataset.name == name
    assert given.dataset.digest == commands[-1].summary["workload_digest"]


@then(parsers.parse("its profile has {count:d} requests and the lengths that requests.parquet has"))
def workload_profile(commands: list[Command], count: int) -> None:
    (given,) = commands[-1].tracked.inputs.dataset_inputs
    profile = json.loads(given.dataset.profile)
    lengths = [row["prompt_tokens"] for row in commands[-1].rows("requests.parquet")]
    assert profile["num_rows"] == count == len(lengths)
    assert profile["prompt_tokens"] == sum(lengths)
    assert (profile["prompt_length"]["min"], profile["prompt_length"]["max"]) == (min(lengths), max(lengths))


@then(parsers.parse('its tags name "{names}"'))
def tags_name(commands: list[Command], names: str) -> None:
    tags = commands[-1].tracked.data.tags
    assert [name for name in names.split() if not tags.get(name)] == []


@then(parsers.parse('the message names uncommitted changes if and only if the tag "{tag}" does'))
def dirty_is_named(commands: list[Command], tag: str) -> None:
    dirty = commands[-1].tracked.data.tags.get(tag) == "true"
    assert ("uncommitted changes" in commands[-1].output) is dirty
