"""Steps about simulated devices: the real command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from statistics import median

import pytest
from pytest_bdd import given, parsers, then, when

from experiments.simulated_steps.run import read, simulated_ms
from features.steps.run_steps import Runner
from kvlab.cli import calibrate, report, tune
from tests.support.commands import TINY, Command, call

#: As many steps as a fit needs, and fewer.
LONG = "model.max_seq_len=96 workload.output_len.min=56 workload.output_len.max=60"
SHORT = "workload.output_len.max=16"
#: As much memory as two of three sequences grow to, and a journal of the blocks.
TIGHT = "kv.num_blocks=7 scheduler.max_batch_size=3 scheduler.admission_reserve=0 figures=true"


@given("the tables of measured operations")
def has_tables() -> None:
    pytest.importorskip("aiconfigurator_core", reason="pip install 'kvlab[silicon]' for the tables")


@when(parsers.re('I run "(?P<text>.*)" for each of these (devices|settings)'))
def run_each(lab: Runner, commands: list[Command], text: str, datatable: list[list[str]]) -> None:
    (name,), *values = datatable
    for (value,) in values:
        commands.append(lab.run(text.replace(f"<{name}>", value)))


@then(parsers.parse('the summary says "{machine}" for its machine'))
def has_machine(commands: list[Command], machine: str) -> None:
    assert commands[-1].summary["machine"] == machine


@then(parsers.parse('the tracked run has the tags "{first}" and "{second}"'))
def has_tags(commands: list[Command], first: str, second: str) -> None:
    tags = commands[-1].tracked.data.tags
    for tag in (first, second):
        name, _, value = tag.partition("=")
        assert tags[name] == value


@then(parsers.parse("{watts:d} W bound the energy of its output tokens"))
def bounded_energy(commands: list[Command], watts: int) -> None:
    metrics = commands[-1].summary["metrics"]
    joules = watts * metrics["duration_s"] / metrics["tokens/output"]
    expected = {"energy/output_token_j_most": joules}
    found = {name: value for name, value in metrics.items() if name.startswith("energy/")}
    assert found == pytest.approx(expected if watts else {})


@then(parsers.parse("half of the recorded {kind} steps on {devices:d} devices are simulated within {percent:d} %"))
def near_steps(kind: str, devices: int, percent: int) -> None:
    steps = [step for step in read() if (step.kind, step.devices) == (kind, devices)]
    assert 100 * median(abs(simulated_ms(step)[1] / step.ms - 1) for step in steps) < percent


@then("each has a larger cache than the one before, and takes less time")
def larger_and_faster(commands: list[Command]) -> None:
    metrics = [command.summary["metrics"] for command in commands]
    sizes = [each["capacity/token_slots"] for each in metrics]
    times = [each["duration_s"] for each in metrics]
    assert sizes == sorted(set(sizes))
    assert times == sorted(set(times), reverse=True)


@then(parsers.parse("both runs have the same {one} and {other}, byte for byte"))
def same_records(commands: list[Command], one: str, other: str) -> None:
    first, second = commands[-2:]
    assert first.directory != second.directory
    for name in (one, other):
        assert (first.directory / name).read_bytes() == (second.directory / name).read_bytes()


@when("I calibrate on it")
def calibrate_on_it(tmp_path: Path, commands: list[Command]) -> None:
    runs = list(dict.fromkeys(str(command.directory) for command in commands))
    commands.append(call(calibrate.main, *runs, f"output={tmp_path / 'calibration.yaml'}"))


@when("I simulate it with that calibration")
def simulate_calibrated(lab: Runner, tmp_path: Path, commands: list[Command]) -> None:
    timing = f"executor.timing=fitted executor.timing_path={tmp_path / 'calibration.yaml'}"
    commands.append(lab.run(f"executor=simulated hardware=here hardware.launch_us=3 {timing} {LONG}"))


@when(parsers.re(r'I play it back with "(?P<settings>.*)"'))
def play_back(lab: Runner, commands: list[Command], settings: str) -> None:
    executor = f"executor=playback executor.recording={commands[-1].directory}"
    commands.append(lab.run(f"{executor} {TIGHT} figures=false {settings}"))


@given(parsers.parse("a recorded run of a tiny model that has {what}"))
def recorded_run(lab: Runner, tmp_path: Path, commands: list[Command], what: str) -> None:
    """A run whose record was changed; `beside` another that was not."""
    real = lab.run({"too few steps": SHORT, "too little memory": TIGHT}.get(what, LONG))
    kept = tmp_path / "run"
    shutil.copytree(real.directory, kept)
    summary = json.loads((kept / "summary.json").read_text())
    if what == "too little memory":
        assert summary["metrics"]["requests/preemptions"] > 0
    elif what == "no steps.parquet":
        (kept / "steps.parquet").unlink()
    elif what == "a cut steps.parquet":
        (kept / "steps.parquet").write_bytes((kept / "steps.parquet").read_bytes()[:-100])
    elif what == "simulated its steps":
        summary["timing"] = "roofline"
    elif what == "another model beside":
        summary["kv_bytes_per_token"] += 64
    elif what == "another machine beside":
        summary["machine"] = "a faraway machine"
    elif what == "not finished":
        summary["status"] = "interrupted"
    (kept / "summary.json").write_text(json.dumps(summary))
    if what == "no summary.json":
        (kept / "summary.json").unlink()
    elif what == "a cut summary.json":
        (kept / "summary.json").write_text("{")
    commands += [real] * what.endswith("beside") + [Command(0, "", kept)]


@when(parsers.parse('I tune on a measured device "{text}"'))
def tune_on_device(tmp_path: Path, commands: list[Command], text: str) -> None:
    arrivals = () if "workload.rate" in text else ("workload.rate=400",)
    deployment = [
        "executor=simulated",
        "executor.dtype=bfloat16",
        "model=qwen3_8b",
        "hardware=h100_sxm",
        "kv.num_blocks=64",
    ]
    workload = ("workload.arrival=uniform", *arrivals, *(word for word in TINY if not word.startswith("model=")))
    commands.append(call(tune.main, *deployment, *workload, *text.split(), "tracking=off", f"output={tmp_path}"))


@then("the report that it names says as it does what to change")
def reported_with_the_advice(tmp_path: Path, commands: list[Command]) -> None:
    found = commands[-1].output
    (advice,) = re.findall("^what to change: .*", found, re.MULTILINE) or [""]
    named = re.search("report: kvlab report (.*)", found)
    words = named[1].split() if named else [str(next(tmp_path.glob("*/search")).parent)]  # of one run it names none
    reported = call(report.main, *words, "figures=false")
    assert reported.code == 0, reported.output
    assert advice == (re.findall("^what to change: .*", reported.output, re.MULTILINE) or [""])[0]
