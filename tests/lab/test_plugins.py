"""A package outside of kvlab adds one implementation to each axis; runs in processes of their own use them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from kvlab.cli.compose import compose_run
from kvlab.config import RunConfig
from kvlab.errors import ConfigError
from kvlab.lab.campaigns.sweep.sweep import record_failure
from kvlab.lab.results.provenance import config_digest
from kvlab.paths import CONF
from kvlab.plugins import load_plugins, raised_in
from tests.support import killer
from tests.support.commands import Command
from tests.support.forked import Forked

ROOT = CONF.parent
TINY = ("model=qwen3_tiny", "executor=cpu", "tracking=off", "figures=false", "scheduler.max_batch_size=4")

PLUGIN = """
from pathlib import Path

from kvlab.attention.backends import ATTENTION_BACKENDS
from kvlab.attention.backends.concat import ConcatAttention
from kvlab.core import Request, SamplingParams
from kvlab.engine.scheduler.orders import ORDERS, Order
from kvlab.engine.scheduler.victims import VICTIMS
from kvlab.engine.speculation import PROPOSERS, Proposer
from kvlab.kv.eviction import EVICTION_POLICIES, LruEviction
from kvlab.kv.pools import POOLS
from kvlab.kv.pools.paged import PagedKVCachePool
from kvlab.workloads.sources import WORKLOAD_SOURCES


def used(what):
    with open("used.txt", "a") as file:
        file.write(what + "\\n")


@ORDERS.register("last_come")
class LastCome(Order):
    def rank(self, sequence):
        used("order")
        return -sequence.request.arrival_s


@VICTIMS.register("longest")
def longest(running):
    used("victim")
    return max(running[1:] or running, key=lambda sequence: len(sequence.token_ids))


@PROPOSERS.register("same_again")
class SameAgain(Proposer):
    def propose(self, token_ids, count):
        used("proposer")
        return [token_ids[-1]] * count


@EVICTION_POLICIES.register("mine")
class MyEviction(LruEviction):
    def __init__(self):
        super().__init__()
        used("eviction")


@ATTENTION_BACKENDS.register("textbook")
class Textbook(ConcatAttention):
    name = "textbook"

    def forward(self, *args):
        used("attention")
        return super().forward(*args)


@POOLS.register("tiled")
class TiledPool(PagedKVCachePool):
    unit = "tile"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        used("pool")


@WORKLOAD_SOURCES.register("constant")
def constant(config, *, vocab_size, seed):
    used("source")
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    return [Request(f"c{i}", tuple(range(i, i + 40)), sampling, 0.0) for i in range(6)]
"""

ORDER = """from kvlab.engine.scheduler.orders import ORDERS, Order

@ORDERS.register("divides")
class Divides(Order):
    def rank(self, sequence):
        return 1 / 0
"""
DIVIDES = "def rank(sequence):\n    return 1 / 0\n"

MORE = """
from kvlab.fleet.base import Choice, Router
from kvlab.fleet.routers import ROUTERS
from kvlab.workloads.importers import IMPORTERS
from kvlab.workloads.importers.base import JsonLinesImporter
from kvlab.workloads.trace_format import TracedRequest


@ROUTERS.register("first")
class First(Router):
    def choose(self, request, replicas, now):
        return Choice(replicas[0].index)


@IMPORTERS.register("gateway")
class Gateway(JsonLinesImporter):
    what = "logs of a gateway"
    begins = '{"gateway"'
    expected = "lines with in and out"

    def of_line(self, place, row):
        yield TracedRequest(row["in"], None, row["out"])
"""


def command(directory: Path, *arguments: str) -> Command:
    """`kvlab` in `directory`, as a user calls it."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), str(directory)])
    process = Forked(killer.run, list(arguments), directory, PYTHONPATH=path)
    output = process.finish()
    return Command(process.returncode or 0, output)


def install(directory: Path, module: str) -> None:
    """Declare an installed package whose entry point is a module that is there."""
    info = directory / f"{module}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[kvlab]\nall = {module}\n")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory with the package `theirs`."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").write_text(PLUGIN)
    return tmp_path


@pytest.mark.slow
class TestRun:
    def test_uses_what_a_plugin_registers_on_every_axis(self, outside: Path) -> None:
        ended = command(
            outside,
            "run",
            "plugins=[theirs]",
            *TINY,
            "scheduler.order=last_come",
            "scheduler.preemption.victim=longest",
            "scheduler.speculation.method=same_again",
            "kv.backend=tiled",
            "kv.eviction=mine",
            "kv.num_blocks=8",
            "attention.backend=textbook",
            "workload.source=constant",
            "workload.name=constant",
            "scheduler.admission_reserve=0",
            "hydra.run.dir=out",
        )
        assert ended.code == 0, ended.output
        used = set((outside / "used.txt").read_text().split())
        assert used == {"order", "victim", "proposer", "eviction", "attention", "pool", "source"}
        assert "8 tiles of 16 tokens" in " ".join(ended.output.split())
        summary = json.loads((outside / "out" / "summary.json").read_text())
        assert summary["config"]["plugins"] == ["theirs"]
        assert summary["attention"] == "textbook"

    def test_help_lists_them(self, outside: Path) -> None:
        page = command(outside, "run", "plugins=[theirs]", "--help").output
        for line in (
            "kv.backend: contiguous, paged, tiled",
            "kv.eviction: cost, fifo, lfu, lru, mine, s3_fifo, sieve",
        ):
            assert line in page

    def test_a_mistyped_name_lists_them(self, outside: Path) -> None:
        ended = command(outside, "run", "plugins=[theirs]", *TINY, "scheduler.order=last_comes")
        assert ended.code == 2
        assert ended.output.startswith("error: scheduler.order=last_comes: unknown; known: ")
        assert "last_come," in ended.output
        assert ended.output.endswith("did you mean last_come?\n")

    def test_commands_with_names_of_their_own_take_them(self, outside: Path) -> None:
        (outside / "more.py").write_text(MORE)
        (outside / "log.jsonl").write_text('{"gateway": 1, "in": 20, "out": 5}\n')
        replayed = command(
            outside, "replay", "plugins=[theirs]", "kv.eviction=mine", "workload=multi_turn", "figure=null"
        )
        assert replayed.code == 0, replayed.output
        assert "mine" in replayed.output
        imported = command(outside, "import", "log.jsonl", "plugins=[more]", "to=trace.jsonl")
        assert "log.jsonl: logs of a gateway, 1 requests, 20 prompt tokens, 5 output tokens" in imported.output
        routed = command(outside, "route", "plugins=more", "fleet.router=first", "upstreams=[http://127.0.0.1:9]")
        assert "none is up" in routed.output  # the router is known

    @pytest.mark.parametrize("is_installed", [False, True])
    def test_an_error_of_a_plugin_ends_a_run_with_its_line(self, outside: Path, is_installed: bool) -> None:
        (outside / "divides.py").write_text(ORDER)
        words = ["run", "scheduler.order=divides", *TINY]
        if is_installed:
            install(outside, "divides")
        else:
            words.append("plugins=[divides]")
        ended = command(outside, *words)
        assert ended.code == 2
        said = "error: ZeroDivisionError: division by zero (divides.py, line 6); HYDRA_FULL_ERROR=1 in the environ"
        assert said in ended.output
        assert "Traceback" not in ended.output
        assert "Error executing job" not in ended.output

    @pytest.mark.parametrize("kind", ["RuntimeError", "OSError"])
    def test_an_error_of_a_plugin_ends_another_command_so_too(self, outside: Path, kind: str) -> None:
        (outside / "more.py").write_text(MORE.replace("yield TracedRequest", f"raise {kind}"))
        (outside / "log.jsonl").write_text('{"gateway": 1, "in": 20, "out": 5}\n')
        ended = command(outside, "import", "log.jsonl", "plugins=[more]", "to=trace.jsonl")
        assert ended.code == 2
        assert ended.output.startswith("error: ")
        assert "(more.py, line 22); HYDRA_FULL_ERROR=1" in ended.output

    def test_an_installed_package_needs_no_setting(self, outside: Path) -> None:
        install(outside, "theirs")
        assert "tiled" in command(outside, "run", "--help").output
        ended = command(outside, "capacity", "model=qwen3_tiny", "memory=1GiB", "kv.eviction=mine")
        assert ended.code == 0, ended.output

    @pytest.mark.parametrize(
        ("source", "said"),
        [
            (None, "error: plugins=absent: cannot be imported: No module named 'absent'; name one in the working"),
            (
                "import missing",
                "error: plugins=absent: cannot be imported: No module named 'missing'\n",
            ),
            (
                "import os\n1 / 0",
                "cannot be imported: ZeroDivisionError: division by zero (absent.py, line 2)\n",
            ),
            (
                "from kvlab.engine.scheduler.orders import ORDERS\nORDERS.register('fcfs')(object)",
                "imported: scheduler.order=fcfs: is registered already, by kvlab.engine.scheduler.orders.fcfs",
            ),
        ],
    )
    def test_a_plugin_that_cannot_be_imported_is_named(self, tmp_path: Path, source: str | None, said: str) -> None:
        if source is not None:
            (tmp_path / "absent.py").write_text(source)
        ended = command(tmp_path, "run", "plugins=[absent]", *TINY)
        assert ended.code == 2
        assert said in ended.output


def test_a_module_that_does_not_exist_is_an_error_of_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"plugins=kvlab_absent: cannot be imported") as caught:
        load_plugins(["kvlab_absent"])
    assert caught.value.key == "plugins"


def test_plugins_are_a_part_of_what_is_measured() -> None:
    assert config_digest(RunConfig(plugins=["theirs"])) != config_digest(RunConfig())


def test_the_code_of_a_plugin_is_a_part_of_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "kvlab_edited"
    package.mkdir()
    for name in ("__init__", "policy"):
        (package / f"{name}.py").write_text("")
    load_plugins(["kvlab_edited"])
    before = config_digest(RunConfig(plugins=["kvlab_edited"]))
    assert config_digest(RunConfig(plugins=["kvlab_edited"])) == before
    (package / "policy.py").write_text("FACTOR = 2")
    assert config_digest(RunConfig(plugins=["kvlab_edited"])) != before


def test_a_file_is_no_module() -> None:
    with pytest.raises(
        ConfigError, match=r"plugins=here/mine\.py: is a file; write mine, in the working directory"
    ):
        load_plugins(["here/mine.py"])


def test_an_error_says_where_in_a_plugin_it_was_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvlab_divides.py").write_text(DIVIDES)
    (package := tmp_path / "kvlab_calculates").mkdir()
    (package / "__init__.py").write_text("from kvlab_calculates.policy import rank")
    (package / "policy.py").write_text(f"\n{DIVIDES}")
    monkeypatch.syspath_prepend(tmp_path)
    load_plugins(["kvlab_divides", "kvlab_calculates"])
    for name, place in (("kvlab_divides", "kvlab_divides.py, line 2"), ("kvlab_calculates", "policy.py, line 3")):
        with pytest.raises(ZeroDivisionError) as caught:
            sys.modules[name].rank(None)
        assert raised_in(caught.value) == f" ({place})"
        summary = record_failure(tmp_path / name, name, caught.value)
        assert summary["error"] == f"ZeroDivisionError: division by zero ({place})"
    assert raised_in(ValueError()) == ""


@pytest.mark.parametrize("key", ["attention.backend", "engine.kind", "executor.kind", "kv.backend"])
def test_a_group_without_a_file_for_a_name_says_which_setting_takes_a_plugins(key: str) -> None:
    group = key.partition(".")[0]
    with pytest.raises(ConfigError, match=rf"^{group}=mine: unknown; known: .*; one of a plugin is {key}=NAME$"):
        compose_run((f"{group}=mine",))
