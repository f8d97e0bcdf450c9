"""Steps about the planner: its command line in this process, and real servers beside what it said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pytest_bdd import given, parsers, then, when
from transformers import AutoConfig

from kvlab.cli import capacity
from kvlab.cli.compose import compose_one
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.core import EngineCore
from kvlab.errors import OutOfBlocksError
from tests.support.commands import Command, call


class Planner:
    """Runs the command; remembers the settings of the last one."""

    def __init__(self) -> None:
        self.arguments: list[str] = []

    def __call__(self, *arguments: str) -> Command:
        self.arguments = list(arguments)
        return call(capacity.main, *arguments)

    def figures(self) -> dict[str, Any]:
        """Of the last command, every figure."""
        found: dict[str, Any] = json.loads(self(*(a for a in self.arguments if a != "--json"), "--json").output)
        return found

    def server(self, backend: str, size: int) -> EngineCore:
        """With the last command's settings, one backend and so many bytes of KV memory."""
        own = ("memory=", "lengths=", "kv.memory=", "--json")
        settings = [text for text in self.arguments if not text.startswith(own)]
        config = compose_one([*settings, f"kv={backend}", f"kv.memory={size}"], "the planner")
        return build_engine(plan_engine(config))


@pytest.fixture
def planner() -> Planner:
    return Planner()


@when(parsers.parse('I plan "{text}"'))
def plan(planner: Planner, commands: list[Command], text: str) -> None:
    commands.append(planner(*text.split()))


@when(parsers.parse("I plan for that directory in {size:d} GiB"))
def plan_directory(planner: Planner, commands: list[Command], model_directory: Path, size: int) -> None:
    commands.append(planner(f"model={model_directory}", f"memory={size}GiB"))


@given(parsers.parse("the config.json of a published {family}"), target_fixture="model_directory")
def published_config(tmp_path: Path, family: str) -> Path:
    """With the sizes that transformers' configuration has by default, which are those of a published model."""
    AutoConfig.for_model(family, eos_token_id=None).save_pretrained(tmp_path)
    return tmp_path


@given(parsers.parse('a directory with the config.json of "{name}"'), target_fixture="model_directory")
def model_directory(tmp_path: Path, name: str) -> Path:
    # A name with all that a command line could stumble over.
    directory = tmp_path / f"{name}'s model, v=1"
    directory.mkdir()
    model = compose_one([f"model={name}"], "the planner").model
    AutoConfig.for_model(model.family, **model.architecture).save_pretrained(directory)
    return directory


@given(parsers.parse('the config.json lacks "{key}"'))
def lacks(model_directory: Path, key: str) -> None:
    file = model_directory / "config.json"
    values = json.loads(file.read_text())
    del values[key]
    file.write_text(json.dumps(values))


@given(parsers.parse('the config.json has "{value}" as "{key}"'))
def has(model_directory: Path, value: str, key: str) -> None:
    file = model_directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


@when(parsers.parse("a server starts with kv={backend} and the KV memory of the plan"), target_fixture="started")
def started(planner: Planner, backend: str) -> tuple[str, dict[str, Any], EngineCore]:
    figures = planner.figures()
    left = figures["memory_bytes"] - figures["weights"]["total"] - figures["working"]["peak"]
    return backend, figures, planner.server(backend, left)


@then("its pool is as planned, and its tensors take the planned bytes")
def as_planned(started: tuple[str, dict[str, Any], EngineCore]) -> None:
    backend, figures, engine = started
    pool, storage = figures["pools"][backend], engine.pool.storage  # type: ignore[attr-defined]
    stats = engine.pool.stats()
    assert (stats.blocks_total, stats.block_size) == (pool["num_blocks"], pool["block_size"])
    scales = [tensor for tensor in (storage.key_scales, storage.value_scales) if tensor is not None]
    assert len(scales) == sum(storage.spec.is_scaled)
    assert sum(tensor.nbytes for tensor in (storage.keys, storage.values, *scales)) == pool["bytes"]


@then(parsers.parse("less than one block of the {size:d} MiB is left over"))
def nothing_left(started: tuple[str, dict[str, Any], EngineCore], size: int) -> None:
    backend, figures, _ = started
    pool = figures["pools"][backend]
    left = size * 2**20 - figures["weights"]["total"] - figures["working"]["peak"] - pool["bytes"]
    assert 0 <= left < pool["block_size"] * figures["bytes_per_token"]


@then(parsers.parse('the planner says "{text}"'))
def planner_says(commands: list[Command], text: str) -> None:
    assert text in commands[-1].output, commands[-1].output


@then(parsers.parse("a token takes {token:d} bytes and a block of {size:d} tokens {block:d}"))
def token_and_block(planner: Planner, token: int, size: int, block: int) -> None:
    figures = planner.figures()
    assert (figures["bytes_per_token"], figures["bytes_per_block"]) == (token, block)
    assert figures["inputs"]["block_size"] == size


@then(parsers.parse("within {percent:d} % of {blocks:d} blocks of {size:d} tokens fit"))
def near_blocks(planner: Planner, percent: int, blocks: int, size: int) -> None:
    assert planner.figures()["inputs"]["block_size"] == size
    assert planner.figures()["pools"]["paged"]["num_blocks"] == pytest.approx(blocks, rel=percent / 100)


@then(parsers.parse("the planner has {share:g} of {mib:d} MiB"))
def share_of_memory(planner: Planner, share: float, mib: int) -> None:
    assert planner.figures()["memory_bytes"] == int(share * mib * 2**20)


@then(parsers.parse("{contiguous:d} contiguous and {paged:d} paged sequences of {length:d} tokens fit"))
def fit(planner: Planner, contiguous: int, paged: int, length: int) -> None:
    (row,) = planner.figures()["sequences"]
    assert (row["length"], row["contiguous"], row["paged"]) == (length, contiguous, paged)


@then(parsers.parse("{paged:d} paged sequences of {length:d} tokens fit, and contiguous slots are not counted"))
def fit_in_blocks_alone(planner: Planner, paged: int, length: int) -> None:
    (row,) = planner.figures()["sequences"]
    assert row == {"length": length, "paged": paged, "paged_unused": row["paged_unused"], "advantage": None}


@then(parsers.parse("exactly as many sequences of {length:d} tokens as planned enter the server with kv={backend}"))
def enter(planner: Planner, length: int, backend: str) -> None:
    (row,) = planner.figures()["sequences"]
    pool = planner.server(backend, 2**20).pool
    for _ in range(row[backend]):
        pool.allocate_slot(length)
    with pytest.raises(OutOfBlocksError):
        pool.allocate_slot(length)


@then(parsers.parse("{count:d} sequences were planned to run at once, and as many did"))
def planned_and_measured(commands: list[Command], count: int) -> None:
    metrics = commands[-1].summary["metrics"]
    assert metrics["capacity/planned_running"] == metrics["capacity/planned_sequences"] == count
    assert metrics["capacity/peak_running"] == count
    assert metrics["capacity/mean_length"] == 32
    assert metrics["capacity/weight_bytes"] > 0


@then(parsers.parse('the planner finds the same for "{first}" as for "{second}" on hardware'))
def same_in_short(planner: Planner, first: str, second: str) -> None:
    found = []
    for devices in (first, second):
        planner("model=llama3_1_70b", "hardware=h100_sxm", devices)
        found.append(planner.figures())
    assert found[0] == found[1]
    assert found[0]["device"] == "4 x h100_sxm"


@then(parsers.parse('the planner finds the same for "{name}", the directory and the file'))
def same(planner: Planner, model_directory: Path, name: str) -> None:
    found = []
    for model in (name, f"model={model_directory}", f"model={model_directory / 'config.json'}"):
        planner(model, "memory=1GiB")
        figures = planner.figures()
        figures.pop("model")
        found.append(figures)
    assert found[0] == found[1] == found[2]
