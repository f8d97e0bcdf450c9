"""Steps about advice: the real command in this process, on a simulated device."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from pytest_bdd import given, parsers, then, when

from experiments.cases import run as cases
from features.steps.sweep_steps import Commands
from kvlab.cli import advise
from kvlab.engine.threads import Cores
from kvlab.lab.advise import adviser, simulations
from tests.support.commands import call

SMALL_ADVICE = (
    "hardware=l4", "model=qwen3_0_6b", "workload.arrival=poisson", "workload.rate=20", "workload.prompt_len.min=50",
    "workload.prompt_len.max=200", "workload.output_len.min=10", "workload.output_len.max=40", "minutes=0.1",
)  # fmt: skip


SECTIONS = ["The question", "What fits", "What to change", "What surprised", "What one should not conclude"]


def advise_on(
    laboratory: Commands, *words: str, tracking: str = "tracking=off", folder: str = "advice", cores: int = 1
) -> None:
    """Later words win over earlier ones."""
    own = [word for word in shlex.split(" ".join(words)) if word]
    keys = {word.partition("=")[0] for word in own}
    base = [word for word in SMALL_ADVICE if word.partition("=")[0] not in keys]
    advised(laboratory, *base, *own, tracking, folder=folder, cores=cores)


def advised(laboratory: Commands, *words: str, folder: str = "advice", cores: int = 1) -> None:
    """With an eighth of the combinations that it tries at most."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adviser, "usable_cores", lambda: Cores(cores, cores))
        patch.setattr(adviser, "_TRIALS", 3)
        laboratory.last = call(advise.main, *words, f"output={laboratory.base / folder}")


def advice_in(laboratory: Commands, folder: str = "advice") -> dict[str, Any]:
    (file,) = (laboratory.base / folder).glob("*/advice.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@when(parsers.parse('I ask for advice on "{text}"'))
def ask_on(laboratory: Commands, text: str) -> None:
    advise_on(laboratory, text)


@when(parsers.parse('I ask for advice on "{text}" and track it'))
def ask_tracked(laboratory: Commands, text: str) -> None:
    advise_on(laboratory, text, tracking=f"tracking.uri={laboratory.uri}")


@given(
    parsers.parse("a recorded trace of {count:d} requests over {seconds:d} seconds"), target_fixture="advice_trace"
)
def trace_for_advice(laboratory: Commands, count: int, seconds: int) -> Path:
    path = laboratory.base / "trace.csv"
    rows = [f"{seconds * number / (count - 1)},{100 + number},{20}" for number in range(count)]
    path.write_text("arrival,prompt,output\n" + "\n".join(rows) + "\n")
    from kvlab.cli import import_

    columns = ("columns.arrival=arrival", "columns.prompt_tokens=prompt", "columns.output_tokens=output")
    target = laboratory.base / "trace.jsonl"
    done = call(import_.main, str(path), *columns, f"to={target}")
    assert done.code == 0, done.output
    return target


@when(parsers.parse('I ask for advice on the trace with "{text}"'))
def ask_on_trace(laboratory: Commands, advice_trace: Path, text: str) -> None:
    words = [word for word in SMALL_ADVICE if not word.startswith("workload.")]
    words += ["workload=recorded", f"workload.path={advice_trace}", "tracking=off", *shlex.split(text)]
    advised(laboratory, *words)


@when("I ask for the same advice again, without what was kept, and by a launcher", target_fixture="asked_again")
def ask_for_the_same(laboratory: Commands, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found = {"first": advice_in(laboratory)}
    text = "workload.num_requests=24 scheduler.max_batch_size=2 keep=[executor,kv,scheduler.max_batched_tokens]"
    with monkeypatch.context() as patch:
        patch.setattr(simulations, "simulate", None)  # no change is left to simulate
        advise_on(laboratory, text)
    assert laboratory.last.code == 0, laboratory.last.output
    found["second"] = advice_in(laboratory)
    advise_on(laboratory, text, folder="fresh", cores=2)
    advise_on(laboratory, text, "hydra/launcher=basic", folder="launched")
    return found | {"third": advice_in(laboratory, "fresh"), "fourth": advice_in(laboratory, "launched")}


@then("all of it is the same, and the second simulated no change again")
def are_the_same(asked_again: dict[str, Any]) -> None:
    assert all(found == asked_again["first"] for found in asked_again.values())


@then(parsers.parse('the first advice is "{settings}"'))
def first_is(laboratory: Commands, settings: str) -> None:
    found = advice_in(laboratory)
    assert (found["proposals"][0]["settings"] if found["proposals"] else "change nothing") == settings
    assert bool(found["plan"]["settings"]) == (settings != "change nothing")


@then("each change has its gain on both parts, what it costs, and a command that tries it")
def each_has(laboratory: Commands) -> None:
    found = advice_in(laboratory)
    for proposal in found["proposals"]:
        assert proposal["verdict"] == "better"
        assert proposal["gain"]["low"] <= proposal["gain"]["value"] <= proposal["gain"]["high"]
        assert 0 < proposal["low"] <= proposal["again"]["value"] <= proposal["high"]
        assert proposal["cost"]
        assert proposal["command"].startswith("kvlab run ")
        assert proposal["command"].endswith(proposal["settings"])
    assert f"try it: {found['plan']['command']}\n" in laboratory.last.output


@then("the plan is better on both parts than today's settings")
def plan_is_better(laboratory: Commands) -> None:
    found = advice_in(laboratory)
    assert found["plan"]["settings"]
    assert found["plan"]["gain"]["low"] > 0 < found["plan"]["again"]["low"]
    assert found["plan"]["figures"]["mean_s"] < found["today"]["mean_s"]


@then(parsers.parse('of what a prefix cache could find it says "{text}"'))
def headroom_says(laboratory: Commands, text: str) -> None:
    assert f"the prefix cache finds {text}" in advice_in(laboratory)["answer"][2]


@then(parsers.parse("it was chosen on requests of the first {seconds:d} seconds, and reported on those behind"))
def halves_are(laboratory: Commands, seconds: int) -> None:
    found = advice_in(laboratory)
    spans = [re.search(r"(\d+) to (\d+) s$", found[name]) for name in ("chosen_on", "reported_on")]
    (_, first), (second, _) = [tuple(map(int, span.groups())) for span in spans if span]
    assert first <= seconds <= second
    today, _, headroom = found["answer"]
    assert today.startswith("Today, on the second half: ")
    assert headroom.startswith("Headroom, on the first half: ")


@then(parsers.parse("no plan takes more than {devices:d} devices"))
def within_devices(laboratory: Commands, devices: int) -> None:
    found = advice_in(laboratory)
    rows = [found["plan"]["figures"], *found["frontier"], *(each["figures"] for each in found["proposals"])]
    assert max(row["devices"] for row in rows) <= devices
    assert found["today"]["devices"] == devices


@then("the price of a million tokens is that of its devices over its tokens")
def price_of(laboratory: Commands) -> None:
    for row in advice_in(laboratory)["frontier"]:
        per_hour = row["tokens_per_s"] * 3600 / 1e6
        assert row["per_million"] == pytest.approx(2 * row["devices"] / per_hour, rel=1e-3)


@then("it is said of today's settings and of each number of devices")
def price_is_said(laboratory: Commands) -> None:
    found, output = advice_in(laboratory), laboratory.last.output
    today = found["today"]
    assert f"{today['devices']} devices at {today['per_million']:,.2f} a million output tokens" in output
    table = output.partition("with the plan")[2].splitlines()
    rows = [line.split()[0 :: len(line.split()) - 1] for line in table[2:] if line.strip()][
        : len(found["frontier"])
    ]
    assert rows == [[str(row["devices"]), f"{row['per_million']:,.2f}"] for row in found["frontier"]]


@then("the page has the answer and asks for nothing from elsewhere")
def page_has(laboratory: Commands) -> None:
    (file,) = (laboratory.base / "advice").glob("*/advice.html")
    page, found = file.read_text(), advice_in(laboratory)
    assert found["proposals"][0]["settings"] in page
    assert all(sentence in page for sentence in found["answer"])
    assert not re.search(r"(src|href)\s*=|url\(|@import", page)


@then("the store holds the advice with a run for the plan and for each change")
def is_tracked(laboratory: Commands) -> None:
    runs = laboratory.lab.runs()
    (parent,) = [run for run in runs if run.tags.get("kvlab.kind") == "advise"]
    children = [run for run in runs if run.tags.get("mlflow.parentRunId") == parent.run_id]
    assert len(children) == 1 + len(advice_in(laboratory)["proposals"])
    assert all(run.metrics["throughput/output_tokens_per_s"] > 0 for run in children)


@then("it names limits that the plan would keep")
def names_limits(laboratory: Commands) -> None:
    found = advice_in(laboratory)
    near = re.search(r"slo\.ttft_ms=(\S+) and slo\.tpot_ms=(\S+) would be kept", found["answer"][1])
    assert near, found["answer"]
    figures = found["plan"]["figures"]
    assert float(near[1]) >= figures["ttft_ms"][1]
    assert float(near[2]) >= figures["tpot_ms"][1]


@then(
    parsers.parse(
        "the page of {name} has its commands, what they printed, its pictures, and what one should not conclude"
    )
)
def page_of_case(name: str) -> None:
    case, page = cases.CASES[name], (cases.PAGES / f"{name}.md").read_text(encoding="utf-8")
    deployment = case.deployment.format(file=case.file)
    assert f"\n    kvlab capacity {deployment} {case.lengths}\n" in page
    assert f"\n    kvlab advise {deployment} {case.asked}\n" in page
    for printed in ("The size of the pool is planned", "\nToday, on ", "\nhow sure: "):
        assert printed in page
    for picture in re.findall(r"\]\((\w+\.png)\)", page):
        assert (cases.PAGES / picture).is_file()
    assert re.findall("^## (.*)", page, re.MULTILINE) == SECTIONS


@then("what a command prints takes the place of what it printed before")
def put_again() -> None:
    page = "before\n<!-- advice -->\n```text\nold\n```\n<!-- end -->\nbehind\n"
    assert cases.put(page, "advice", "new") == page.replace("old", "new")


@then("prefixes from neighbours and a shared store are among what was tried")
def tried_on_the_fleet(laboratory: Commands) -> None:
    advice = advice_in(laboratory)
    tried = [proposal["settings"] for proposal in advice["proposals"]] + advice["no_difference"] + advice["worse"]
    assert {"fleet.neighbours=true", "fleet.store=256GiB"} <= set(tried)


@then("what the time of requests went into sums to all of it")
def causes_of_the_fleet(laboratory: Commands) -> None:
    causes = advice_in(laboratory)["headroom"]["causes"]
    assert sum(causes.values()) == pytest.approx(1, abs=0.03)  # those below half a hundredth are not named
