"""Steps about runs: the real command, a real tracking store."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow.tracking import MlflowClient
from pytest_bdd import given, parsers, then, when

from tests.support.commands import TIMEOUT_S, TINY, Command, Lab
from tests.support.disk import disk
from tests.support.forked import Forked

#: Long enough for every request to have several blocks.
SETTINGS = (
    *TINY,
    "model.max_seq_len=64",
    "executor.dtype=float32",
    "workload.num_requests=4",
    "workload.prompt_len={min: 17, max: 24}",
    "workload.output_len={min: 16, max: 20}",
)


class Runner:
    """Runs commands against one tracking store; the same command line is run once. In scenarios that are not tagged
    `@tracked`, `run` leaves out the store, which takes as long as a small run.
    """

    def __init__(self, base: Path) -> None:
        self.lab = Lab.with_store(base, SETTINGS)
        self.tracked = False
        self._done: dict[tuple[str, bool], Command] = {}
        self._folders = count()

    def folder(self) -> str:
        """One for the results of the next command."""
        return f"out{next(self._folders)}"

    def run(self, text: str, *flags: str) -> Command:
        key = text, self.tracked
        if key not in self._done:
            store = [] if self.tracked else ["tracking=off"]
            self._done[key] = self.lab.here(*flags, *store, *text.split(), directory=self.folder())
        return self._done[key]

    def apart(self, text: str) -> Command:
        """Run it in a process of its own."""
        return self.lab.apart(*text.split(), directory=self.folder())


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def tracked_runs(lab: Runner) -> Iterator[None]:
    """Of a scenario tagged `@tracked`."""
    lab.tracked = True
    yield
    lab.tracked = False


@pytest.fixture
def commands() -> list[Command]:
    """The commands of a scenario, the latest last."""
    return []


@when(parsers.parse('I run "{text}" on a tiny model'))
def run(lab: Runner, commands: list[Command], text: str) -> None:
    commands.append(lab.run(text))


@when(parsers.parse('I run "{text}" on the model of that directory'))
def run_directory(lab: Runner, commands: list[Command], model_directory: Path, text: str) -> None:
    commands.append(lab.lab.here("tracking=off", f"model={model_directory}", *text.split(), directory=lab.folder()))


@when(parsers.parse('I run "{text}" on a tiny model twice'))
def run_twice(lab: Runner, commands: list[Command], text: str) -> None:
    commands += [lab.run(text), lab.apart(text)]


@when(parsers.parse('a tiny model is run with "{first}" and with "{second}"'))
def run_two(lab: Runner, commands: list[Command], first: str, second: str) -> None:
    commands += [lab.run(first), lab.run(second)]


@when(parsers.parse('I run "{text}" on a tiny model into the directory "{name}"'))
def run_into(lab: Runner, commands: list[Command], text: str, name: str) -> None:
    commands.append(lab.lab.here(*text.split(), directory=name))


@when(parsers.parse('I sweep "{text}" on a tiny model'))
def run_sweep(lab: Runner, commands: list[Command], text: str) -> None:
    commands.append(lab.run(text, "-m"))


@given("a tracking server that accepts connections and never answers", target_fixture="silent_server")
def silent_server() -> Iterator[str]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@when(parsers.parse('I run "{text}" on a tiny model against that server'))
def run_against(lab: Runner, commands: list[Command], silent_server: str, text: str) -> None:
    other = Lab(lab.lab.base, SETTINGS, silent_server)
    commands.append(other.apart(*text.split(), directory=lab.folder()))


@when(
    parsers.parse(
        'I start a run that would take minutes on a tiny model and send it "{name}" once it produces tokens'
    )
)
def interrupt(lab: Runner, commands: list[Command], name: str) -> None:
    commands.append(long_run(lab, lambda process: process.send_signal(getattr(signal, name))))


def long_run(lab: Runner, strike: Callable[[Forked], object], *settings: str) -> Command:
    """A run of minutes that is struck once it produces tokens, at its end."""
    # Requests that arrive for minutes; tokens of the first are there as soon as the steps begin.
    long = "workload=mixed32 workload.rate=2 workload.num_requests=500 model.max_seq_len=1024"
    more = "workload.prompt_len.max=64 workload.output_len.max=400"
    directory = lab.folder()
    # As on a terminal, where a bar shows tokens at once.
    process = lab.lab.start(*long.split(), *more.split(), *settings, directory=directory, FORCE_COLOR="1")
    said = ""
    while "tok/s" not in said:
        character = process.stdout.read(1)
        assert character, said
        said += character
    strike(process)
    rest = process.finish(TIMEOUT_S)
    return Command(process.returncode or 0, said + rest, lab.lab.base / directory, lab.lab.uri)


@then("the command succeeds")
def succeeds(commands: list[Command]) -> None:
    assert commands[-1].code == 0, commands[-1].output


@then("the command fails without a traceback")
def fails(commands: list[Command]) -> None:
    assert commands[-1].code not in (0, None)
    assert "Traceback" not in commands[-1].output, commands[-1].output


@when(parsers.parse('I run "{text}" on a tiny model while the disk has no space for "{file}"'))
def run_on_full_disk(lab: Runner, commands: list[Command], text: str, file: str) -> None:
    folder = lab.folder()
    with disk(lab.lab.base / folder, match="." if file == "anything" else file):
        commands.append(lab.lab.here(*text.split(), directory=folder))


@then(parsers.parse('the other results on disk are "{names}"'))
def others_are(commands: list[Command], names: str) -> None:
    assert sorted(file.name for file in commands[-1].directory.iterdir()) == names.split()


@then(parsers.parse("the run has {prompt:d} prompt tokens and {output:d} output tokens"))
def has_all_tokens(commands: list[Command], prompt: int, output: int) -> None:
    metrics = commands[-1].summary["metrics"]
    assert (metrics["tokens/prompt"], metrics["tokens/output"]) == (prompt, output)


@then(parsers.parse("the command ends with status {code:d}"))
def ends_with(commands: list[Command], code: int) -> None:
    assert commands[-1].code == code, commands[-1].output
    assert "Traceback" not in commands[-1].output


def pattern_of(text: str) -> str:
    """Its parts, between which "..." stands for anything."""
    return ".*?".join(re.escape(part.strip()) for part in text.split("..."))


@then(parsers.parse('the message says "{text}"'))
def message_says(commands: list[Command], text: str) -> None:
    """Its parts, between which "..." stands for anything, as they are and in this order; of a command that ended
    with an error, within the error alone.
    """
    said = " ".join(commands[-1].output.split())
    message = said[said.rindex("error: ") :] if "error: " in said and commands[-1].code else said
    assert re.search(pattern_of(text), message), message


@then(parsers.parse('of "{text}" it is said once'))
def said_once(commands: list[Command], text: str) -> None:
    assert len(re.findall(pattern_of(text), " ".join(commands[-1].output.split()))) == 1, commands[-1].output


@then(
    parsers.parse(
        'the run used the choice "{kv}" for "kv", "{scheduler}" for "scheduler" and "{attention}" for "attention"'
    )
)
def used(commands: list[Command], kv: str, scheduler: str, attention: str) -> None:
    command = commands[-1]
    config = yaml.safe_load((command.directory / "config.yaml").read_text())
    assert (config["kv"]["backend"], config["scheduler"]["policy"]) == (kv, scheduler)
    assert command.summary["attention"] == attention
    tags = command.tracked.data.tags
    assert (tags["choice.kv"], tags["choice.scheduler"], tags["choice.attention"]) == (kv, scheduler, attention)


@then(parsers.parse("all {count:d} requests were completed"))
def all_completed(commands: list[Command], count: int) -> None:
    assert commands[-1].summary["metrics"]["requests/completed"] == count


@then(parsers.parse('the tracked run is "{status}"'))
def tracked_status(commands: list[Command], status: str) -> None:
    assert commands[-1].tracked.info.status == status


@then(parsers.parse('the tracked run is "{status}" with the tag "{tag}"'))
def tracked_status_and_tag(commands: list[Command], status: str, tag: str) -> None:
    run = commands[-1].tracked
    assert (run.info.status, run.data.tags["kvlab.status"]) == (status, tag)


@then("it has the metrics")
def has_metrics(commands: list[Command], datatable: list[list[str]]) -> None:
    metrics = commands[-1].tracked.data.metrics
    for (name,) in datatable[1:]:
        assert metrics[name] > 0, name


@then("they equal those of summary.json")
def metrics_equal(commands: list[Command]) -> None:
    tracked = commands[-1].tracked.data.metrics
    for name, value in commands[-1].summary["metrics"].items():
        assert tracked[name] == pytest.approx(value), name


@then("its parameters hold every setting of config.yaml")
def parameters_complete(commands: list[Command]) -> None:
    params = commands[-1].tracked.data.params

    def check(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                check(f"{prefix}.{key}" if prefix else key, item)
        elif value != []:  # an empty list sets nothing
            assert params[prefix] == str(value), prefix

    check("", yaml.safe_load((commands[-1].directory / "config.yaml").read_text()))


@then(parsers.parse('its artifacts are "{names}"'))
def artifacts(commands: list[Command], names: str) -> None:
    command = commands[-1]
    found = MlflowClient(command.uri).list_artifacts(command.summary["run_id"])
    assert {file.path for file in found} >= set(names.split())


@then(parsers.parse('its folder "{folder}" holds "{names}"'))
def folder_holds(commands: list[Command], folder: str, names: str) -> None:
    command = commands[-1]
    found = MlflowClient(command.uri).list_artifacts(command.summary["run_id"], folder)
    assert {Path(file.path).name for file in found} == set(names.split())
    assert all(file.file_size > 1000 for file in found)


@then("its page has each request with its time to the first token, and the blocks that it holds")
def page_has_requests(commands: list[Command]) -> None:
    rows = commands[-1].rows("requests.parquet")
    page = (commands[-1].directory / "figures" / "hover.html").read_text()
    timeline, _, pool_map = page.partition('"type":"heatmap"')
    (drawn,) = re.findall(r'"customdata":(\[\["\w+",[\d.]+\].*?\]\]),"hovertemplate":"[^"]*first token', timeline)
    assert [name for name, _ in json.loads(drawn)] == [row["request_id"] for row in rows]
    assert [ttft for _, ttft in json.loads(drawn)] == pytest.approx([row["ttft_ms"] for row in rows])
    assert all(f'"{row["request_id"]}"' in pool_map for row in rows)


@then(parsers.parse("requests.parquet holds a row for each of {count:d} requests with its tokens and times"))
def request_rows(commands: list[Command], count: int) -> None:
    rows = commands[-1].rows("requests.parquet")
    assert len({row["request_id"] for row in rows}) == count
    for row in rows:
        assert row["finish_reason"] == "length"
        assert 16 <= len(row["output_token_ids"]) <= 20
        assert row["arrival_s"] <= row["scheduled_s"] <= row["first_token_s"] <= row["end_s"]
        assert row["ttft_ms"] == pytest.approx(1000 * (row["first_token_s"] - row["arrival_s"]))


@then(parsers.parse('the peak of "{column}" in steps.parquet is the metric "{metric}"'))
def step_peak(commands: list[Command], column: str, metric: str) -> None:
    peak = max(row[column] for row in commands[-1].rows("steps.parquet"))
    assert peak == commands[-1].summary["metrics"][metric] > 0


@then(parsers.parse('the sum of the tokens in requests.parquet is the metric "{metric}"'))
def token_sum(commands: list[Command], metric: str) -> None:
    tokens = sum(len(row["output_token_ids"]) for row in commands[-1].rows("requests.parquet"))
    assert tokens == commands[-1].summary["metrics"][metric]


@then("the results on disk are complete")
def results_complete(commands: list[Command]) -> None:
    command = commands[-1]
    names = {"config.yaml", "requests.parquet", "steps.parquet", "summary.json"}
    assert names <= {file.name for file in command.directory.iterdir()}
    assert command.summary["metrics"]["throughput/output_tokens_per_s"] > 0
    assert command.rows("requests.parquet")
    assert command.rows("steps.parquet")


@then("it has figures of the part that ran")
def partial_figures(commands: list[Command]) -> None:
    metrics = commands[-1].tracked.data.metrics
    assert metrics["tokens/output"] > 0
    assert metrics["requests/completed"] < 500
    assert metrics["kv/leaked_blocks"] == 0
