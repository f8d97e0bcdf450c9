"""Steps about what numbers are stored in: K and V, and matrices."""

from __future__ import annotations

from pytest_bdd import parsers, then

from features.steps.run_steps import SETTINGS
from kvlab.cli.compose import compose_run
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.executors.torch import build_decoder
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.planning.memory import matrices
from tests.support.commands import Command
from tests.support.loaded import loaded_bytes


@then(parsers.parse("a token's K and V take {count:d} bytes in the pool"))
def bytes_of_a_token(commands: list[Command], count: int) -> None:
    metrics = commands[-1].summary["metrics"]
    assert metrics["capacity/kv_bytes"] == metrics["capacity/token_slots"] * count


@then(parsers.parse('{count:d} of them are its K\'s with "{settings}"'))
def bytes_of_its_keys(count: int, settings: str) -> None:
    pool = build_engine(plan_engine(compose_run([*SETTINGS, *settings.split()]).config)).pool
    assert isinstance(pool, PagedKVCachePool)
    storage = pool.storage
    assert storage is not None
    scales = 0 if storage.key_scales is None else storage.key_scales.nbytes
    assert storage.keys.nbytes + scales == count * storage.keys.shape[1] * storage.block_size


@then(parsers.parse('each has more "{metric}" than the one before'))
def more_than_before(commands: list[Command], metric: str) -> None:
    values = [command.summary["metrics"][metric] for command in commands]
    assert len(values) > 1
    assert values == sorted(set(values))
    assert 0 < values[0] < 0.001
    assert values[-1] < 0.1


@then(parsers.parse('it has no metrics of "{group}"'))
def no_metrics_of(commands: list[Command], group: str) -> None:
    assert commands[-1].code == 0, commands[-1].output
    assert not [name for name in commands[-1].summary["metrics"] if name.startswith(f"{group}/")]


@then(
    parsers.parse('a number of a matrix takes {plain:d} bits in memory with "{one}", and {packed:d} with "{other}"')
)
def bits_of_a_number(plain: int, one: str, packed: int, other: str) -> None:
    taken = []
    for setting in (one, other):
        plan = plan_engine(compose_run([*SETTINGS, "executor.dtype=bfloat16", setting]).config)
        numbers = sum(matrix.times * matrix.outputs * matrix.inputs for matrix in matrices(plan.model))
        taken.append(8 * (loaded_bytes(build_decoder(plan))[0] - plan.weights.norms) / numbers)
    # A row of a matrix has a table of its exponents, less than half a bit a number in this small model.
    assert [int(bits) for bits in taken] == [plain, packed]
