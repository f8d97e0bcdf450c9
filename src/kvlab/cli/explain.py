"""kvlab explain: why a run's requests took as long as they did, and what would have helped.

kvlab explain outputs/2026-01-01/12-00-00.000000
kvlab explain outputs/2026-01-01/12-00-00.000000 slowest=10
kvlab explain outputs/2026-01-01/12-00-00.000000 request=r399
kvlab explain trace=monday.jsonl hardware=h100_sxm model=llama3_1_8b slowest=10

The run is served once more, step by step: a simulated run as it was, a run that computed its steps with the times
that were recorded. Each request's time becomes terms that sum to it exactly, each prompt's tokens what became of
them. For a request it is simulated again what would have helped, with one thing changed; for a run that computed
its steps with times that are fitted to them, if that comes near enough to the run.

Of a simulated fleet a request is followed from replica to replica, with the scores by which its router chose.

The trace of another server is simulated with the settings of `kvlab run` that follow. What the recorded time has
beyond the simulated one, or less, is a term of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.cli.settings import bare_words, command, setting, unknown_setting
from kvlab.config.values import at_least, picture_name
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from kvlab.lab.explain.changes import Change
    from kvlab.lab.explain.recorded import RecordedExplanation
    from kvlab.lab.explain.replayed import Explanation
    from kvlab.lab.results.requests import SampleKey
    from kvlab.lab.terminal import Terminal


@dataclass
class ExplainSettings:
    """What a run is asked."""

    run: str | None = setting(None, "the run: its directory, or its id", "DIR")
    trace: str | None = setting(None, "or a recorded trace, with settings of kvlab run that simulate it", "FILE")
    request: str | None = setting(None, "one request, by its id", "ID")
    slowest: int = setting(5, "the requests that took longest, beside all", "N")
    changes: bool = setting(True, "without simulating what would have helped the request", "false")
    figure: str | None = setting("explain.png", "the picture; null: none", "FILE")
    json: bool = setting(False, "every figure as JSON; or --json", "true")

    def __post_init__(self) -> None:
        at_least("slowest", self.slowest, 0)
        picture_name("figure", self.figure)


def _explained_trace(settings: ExplainSettings, overrides: list[str], console: Terminal) -> RecordedExplanation:
    from kvlab.cli.compose import compose_one
    from kvlab.lab.explain.recorded import explain_trace
    from kvlab.lab.settings import as_word
    from kvlab.workloads.trace_format import read_header

    read_header(str(settings.trace), "trace")  # that it is one, before it is the path of a workload
    workload = ["workload=recorded", as_word("workload.path", settings.trace), "figures=false", "tracking=off"]
    config, wanted = compose_one([*workload, *overrides], "explain", fleets="all"), settings.request
    with console.status("simulating the trace"):
        told = explain_trace(config, [] if wanted is None else [wanted])
    if wanted is not None and (wanted, 0) not in told.lives:
        some = ", ".join(name for name, _ in list(told.lives)[:3])
        text = f"is none of the {len(told.lives):,} requests of which the trace says how long they took, such as "
        raise ConfigError("request", wanted, text + some)
    return told


def _explained(settings: ExplainSettings, console: Terminal) -> Explanation:
    from rich.progress import Progress

    from kvlab.cli.recorded import find_run, recorded_config
    from kvlab.lab.explain.replayed import explain_run
    from kvlab.lab.results.records import read_run

    if settings.run is None:
        raise ConfigError("run", None, "name a run, or trace=FILE: kvlab explain outputs/... request=r3")
    directory = find_run(settings.run)
    run, wanted = read_run(directory), settings.request
    if wanted is not None and wanted not in (names := {record.request_id for record in run.requests()}):
        some = ", ".join(sorted(names, key=lambda name: (len(name), name))[:3])
        raise ConfigError("request", wanted, f"is none of the run's {len(names):,} requests, such as {some}")
    with Progress(console=console, transient=True, disable=not console.is_interactive) as progress:
        bar = progress.add_task("serving it again", total=None)
        return explain_run(
            run,
            recorded_config(directory),
            [] if wanted is None else [wanted],
            lambda done, of: progress.update(bar, completed=done, total=of),
        )


def _resimulated(
    told: Explanation, settings: ExplainSettings, keys: list[SampleKey]
) -> tuple[Explanation | None, str]:
    """A run that computed its steps, simulated by their times, and how far off that is; None where it is too far
    or cannot be.
    """
    from kvlab.cli.recorded import find_run, read_real_run
    from kvlab.lab.explain.fitted import resimulate

    try:
        again = resimulate(told, read_real_run(find_run(str(settings.run))), keys)
    except ConfigError as error:
        return None, f"what would have helped is not known: {error}"
    if not again.agrees:
        return None, f"what would have helped is not known: {again.error}, which is too far off"
    return again.explanation, again.error


def _written_out(arguments: list[str]) -> list[str]:
    """See bare_words: a file is a trace, and anything else a run."""
    is_file = {text for text in arguments if "=" not in text and Path(text).is_file()}
    return bare_words("run")([f"trace={text}" if text in is_file else text for text in arguments])


@command(__doc__, ExplainSettings, bare=False, written_out=_written_out)
def main(settings: ExplainSettings, others: list[str]) -> int:
    if others and settings.trace is None:
        raise unknown_setting(ExplainSettings, others[0])
    if settings.trace is not None and settings.run is not None:
        raise ConfigError("trace", settings.trace, "is beside run=; name one of them")
    from kvlab.lab.explain.changes import counterfactuals
    from kvlab.lab.explain.text import as_json, show_all, show_changes, show_one
    from kvlab.lab.results.sureness import ratios_off
    from kvlab.lab.terminal import Terminal

    console = Terminal(stderr=settings.json)
    told: Explanation
    if settings.trace is not None:
        told = compared = _explained_trace(settings, others, console)
        console.print(f"{settings.trace}: {compared.agreement}\n")
    else:
        told = _explained(settings, console)
    keys = [key for key in told.lives if key[0] == settings.request]
    changes: list[Change] = []
    remark = ""
    if keys and settings.changes:
        with console.status("simulating what would have helped") as status:
            base, remark = (told, "") if told.is_simulated else _resimulated(told, settings, keys)
            if base is not None:
                changes = counterfactuals(base, keys, lambda what: status.update(f"simulating: {what}"))
    if settings.json:
        shown = keys if settings.request else told.slowest(len(told.lives))
        print(json.dumps(as_json(told, shown, changes) | {"simulation": remark or None}, indent=2))
    elif keys:
        for key in keys:
            show_one(told, key, console)
        if remark:
            console.print(f"\n{remark}", style="dim")
        if changes:
            show_changes(changes, keys[0][0], console)
            if told.is_simulated and (near := ratios_off(group.plan for group in told.plan.parts)):
                console.print(near, style="dim", soft_wrap=True)
    else:
        show_all(told, settings.slowest, console)
    if settings.figure is not None:
        from kvlab.lab.figures import save_figure
        from kvlab.lab.figures.explained import prompt_reasons_figure, request_terms_figure

        drawn = request_terms_figure(told, keys) if keys else prompt_reasons_figure(told)
        save_figure(drawn, Path(settings.figure))
        console.print(f"picture: {settings.figure}")
    return 0
