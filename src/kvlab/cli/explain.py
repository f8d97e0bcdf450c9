"""kvlab explain: why a run's requests took as long as they did, and what would have helped.

kvlab explain outputs/2026-01-01/12-00-00.000000
kvlab explain outputs/2026-01-01/12-00-00.000000 slowest=10
kvlab explain outputs/2026-01-01/12-00-00.000000 request=r399
kvlab explain trace=monday.jsonl executor=simulated hardware=h100_sxm model=llama3_1_8b slowest=10

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
from typing import TYPE_CHECKING, Any

from kvlab.cli.settings import bare_words, command, setting, unknown_setting
from kvlab.config.values import at_least, picture_name
from kvlab.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlab.fleet.fleet import Routed
    from kvlab.lab.explain.changes import Change
    from kvlab.lab.explain.lives import Key, Life
    from kvlab.lab.explain.recorded import RecordedExplanation
    from kvlab.lab.explain.replayed import Explanation
    from kvlab.lab.terminal import Terminal

_LEAST_SHOWN = 0.005  # of the time
_MOST_HOLDERS = 3
_MOST_SCORES = 8  # of replicas
_STAGES = {"all": "", "prefill": "its prompt ", "decode": "with its prompt computed "}
_MOST_MS = 100_000.0  # longer times are shown in seconds


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
    from kvlab.workloads.trace_format import read_header

    read_header(str(settings.trace), "trace")  # that it is one, before it is the path of a workload
    workload = ["workload=recorded", f"workload.path={settings.trace}", "figures=false", "tracking=off"]
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

    from kvlab.cli.compose import recorded_config
    from kvlab.cli.roofline import find_run
    from kvlab.lab.explain.replayed import explain_run
    from kvlab.lab.results.records import read_run

    if settings.run is None:
        raise ConfigError("run", None, "name a run, or trace=FILE: kvlab explain outputs/... request=r3")
    directory = find_run(settings.run)
    run, wanted = read_run(directory), settings.request
    if wanted is not None and wanted not in (names := {record.request_id for record in run.requests()}):
        some = ", ".join(sorted(names, key=lambda name: (len(name), name))[:3])
        raise ConfigError("request", wanted, f"is none of the run's {len(names):,} requests, such as {some}")
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("serving it again", total=None)
        return explain_run(
            run,
            recorded_config(directory),
            [] if wanted is None else [wanted],
            lambda done, of: progress.update(bar, completed=done, total=of),
        )


def _resimulated(told: Explanation, settings: ExplainSettings, keys: list[Key]) -> tuple[Explanation | None, str]:
    """A run that computed its steps, simulated by their times, and how far off that is; None where it is too far
    or cannot be.
    """
    from kvlab.cli.calibrate import read_real_run
    from kvlab.cli.roofline import find_run
    from kvlab.lab.explain.fitted import resimulate

    try:
        again = resimulate(told, read_real_run(find_run(str(settings.run))), keys)
    except ConfigError as error:
        return None, f"what would have helped is not known: {error}"
    if not again.agrees:
        return None, f"what would have helped is not known: {again.error}, which is too far off"
    return again.explanation, again.error


def _show_terms(terms: Mapping[Any, float], console: Terminal, unit: str, per: int = 1) -> None:
    """Terms with their shares, the longest first."""
    from kvlab.lab.results.tables import new_table

    whole = sum(terms.values())
    seconds = whole / per >= _MOST_MS
    table, per = new_table(unit, "s" if seconds else "ms", "%", no_wrap=True), per * (1000 if seconds else 1)
    shown = {str(name): value for name, value in terms.items() if whole and abs(value / whole) >= _LEAST_SHOWN}
    if rest := sum(value for name, value in terms.items() if str(name) not in shown):
        shown["others"] = rest
    for name, value in shown.items():
        table.add_row(name, f"{value / per:,.1f}", f"{100 * value / whole:.1f}")
    table.add_row("together", f"{whole / per:,.1f}", "100.0", style="bold")
    console.print(table)


def _show_all(told: Explanation, slowest: int, console: Terminal) -> None:
    """All requests, and the slowest."""
    count = len(told.lives)
    console.print(f"{count:,} requests on {told.plan.machine}; of a request, in the mean:\n")
    _show_terms(told.terms_ms(), console, "its time went into", max(count, 1))
    tokens = told.prompt_tokens()
    whole = sum(tokens.values())
    parts = (f"{100 * number / whole:.1f} % {reason}" for reason, number in tokens.items())
    console.print(f"\nof {whole:,} prompt tokens " + "; ".join(parts))
    if names := told.plan.config.fleet.names:
        rows = {}
        for name in dict.fromkeys(names):
            own = [key for key in told.lives if names[told.records[key].replica] == name]
            if own:  # none ends where prompts are computed apart
                rows[f"{name} ({len(own):,})"] = own
        _show_mostly("requests of a group, mean", rows, told, console)
    keys = told.slowest(slowest)
    if not keys:
        return
    _show_mostly("slowest", {told.records[key].name: [key] for key in keys}, told, console)
    name = told.records[keys[0]].request_id
    console.print(f"one of them, and what would have helped: request={name}")


def _show_mostly(title: str, rows: dict[str, list[Key]], told: Explanation, console: Terminal) -> None:
    """The mean time of these requests, and the two terms that have most of it."""
    from kvlab.lab.results.tables import new_table

    table = new_table(title, "ms", no_wrap=True)
    table.add_column("mostly")
    for name, keys in rows.items():
        count, terms = len(keys), told.terms_ms(set(keys))
        mostly = "; ".join(f"{cause} {value / count:,.0f}" for cause, value in list(terms.items())[:2])
        table.add_row(name, f"{sum(map(told.latency_ms, keys)) / count:,.0f}", mostly)
    console.print()
    console.print(table)


def _show_one(told: Explanation, key: Key, console: Terminal) -> None:
    """One request's terms, and its prompt."""
    record, life = told.records[key], told.lives[key]
    output = len(record.output_token_ids)
    console.print(
        f"{record.name}: {record.prompt_tokens:,} tokens in, {output:,} out, came at {record.arrival_s:,.3f} s "
        f"with {life.before:,} before it in the queue"
    )
    for hop in told.hops.get(key[0], ()):
        console.print(_sent(told, hop))
    for pull in told.pulls.get(key[0], ()):
        milliseconds = 1000 * (pull.end_s - pull.ready_s)
        console.print(
            f"at {pull.ready_s:,.3f} s {pull.tokens:,} tokens pulled from replica {pull.source} in "
            f"{milliseconds:,.1f} ms"
        )
    console.print()
    _show_terms(told.terms_of(key), console, "from arrival to end")
    first_ms = told.first_token_ms(key)
    if record.first_token_s is not None and first_ms is not None:
        terms = told.terms_of(key, record.first_token_s)
        parts = (f"{cause} {value:,.1f}" for cause, value in terms.items() if abs(value) >= 0.05)
        console.print(f"\nfirst token after {first_ms:,.1f} ms: " + "; ".join(parts))
    if life.holders:
        _show_holders(told, life, console)
    prompt = told.prompts.get((key[0], 0))
    if prompt is None:
        return
    parts = (f"{number:,} {reason}" for reason, number in prompt.tokens.items())
    said = f"of {sum(prompt.tokens.values()):,} prompt tokens " + "; ".join(parts)
    if prompt.diverged_at is not None:
        said += f". It diverged in block {prompt.diverged_at:,}"
    if prompt.eviction is not None:
        ago, by = prompt.at_s - prompt.eviction.at_s, prompt.eviction.by
        whom = f" in a step that computed the prompt of {by[0]}" if by else ""
        said += f". Evicted {ago:,.3f} s before{whom}"
    console.print(said)


def _sent(told: Explanation, hop: Routed) -> str:
    """Where the router sent a request, and why."""
    names, (chosen, scores) = told.plan.config.fleet.names, (hop.choice.replica, hop.choice.scores)
    is_first = hop.stage == "decode" and hop is told.hops[hop.request_id][0]
    stage = "for blocks of its prompt " if is_first else _STAGES[hop.stage]
    text = f"at {hop.at_s:,.3f} s {stage}to replica {chosen}{f', {names[chosen]}' if names else ''}"
    if len(scores) == len(hop.among):
        by_score = sorted(zip(scores, hop.among, strict=True), key=lambda pair: pair[1] != chosen)
        shown = ", ".join(f"{index}: {score:,.3g}" for score, index in by_score[:_MOST_SCORES])
        text += f"; scores {shown}{', ...' if len(scores) > _MOST_SCORES else ''}"
    elif scores:
        text += f"; scores {', '.join(f'{score:,.3g}' for score in scores)} of those that were compared"
    return text


def _show_holders(told: Explanation, life: Life, console: Terminal) -> None:
    whole = life.holders.total()
    parts = (
        f"{told.records[key].name if key in told.records else key[0]} {100 * share / whole:.0f} %"
        for key, share in life.holders.most_common(_MOST_HOLDERS)
    )
    console.print(f"the blocks it waited for were held by {', '.join(parts)}")


def _show_changes(changes: list[Change], name: str, console: Terminal) -> None:
    from kvlab.lab.results.tables import new_table

    table = new_table("ms, simulated", name, "saved", "all", "saved", "p99", no_wrap=True)
    base = changes[0]
    for change in changes:
        row = [change.settings or change.what]
        for value, before in ((change.asked_ms, base.asked_ms), (change.mean_ms, base.mean_ms)):
            row += [f"{value:,.0f}", "" if change is base else f"{before - value:+,.0f}"]
        table.add_row(*row, f"{change.p99_ms:,.0f}")
    console.print()
    console.print(table)


def _as_json(told: Explanation, keys: list[Key], changes: list[Change]) -> dict[str, Any]:
    from dataclasses import asdict

    requests = []
    for key in keys:
        prompt = told.prompts.get(key)
        requests.append(
            {
                "request_id": key[0],
                "sample": key[1],
                "e2el_ms": told.latency_ms(key),
                "terms_ms": {cause.name.lower(): value for cause, value in told.terms_of(key).items()},
                "prompt_tokens": {r.name.lower(): n for r, n in prompt.tokens.items()} if prompt else None,
                "sent": [
                    {"at_s": hop.at_s, "stage": hop.stage, "among": hop.among, **asdict(hop.choice)}
                    for hop in told.hops.get(key[0], ())
                ],
                "pulled": [asdict(pull) for pull in told.pulls.get(key[0], ())],
            }
        )
    return {
        "terms_ms": {cause.name.lower(): value for cause, value in told.terms_ms().items()},
        "prompt_tokens": {reason.name.lower(): number for reason, number in told.prompt_tokens().items()},
        "requests": requests,
        "changes": [asdict(change) for change in changes],
    }


@command(__doc__, ExplainSettings, bare=False, written_out=bare_words("run"))
def main(settings: ExplainSettings, others: list[str]) -> int:
    if others and settings.trace is None:
        raise unknown_setting(ExplainSettings, others[0])
    if settings.trace is not None and settings.run is not None:
        raise ConfigError("trace", settings.trace, "is beside run=; name one of them")
    from kvlab.lab.explain.changes import counterfactuals
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
        print(json.dumps(_as_json(told, shown, changes) | {"simulation": remark or None}, indent=2))
    elif keys:
        for key in keys:
            _show_one(told, key, console)
        if remark:
            console.print(f"\n{remark}", style="dim")
        if changes:
            _show_changes(changes, keys[0][0], console)
            if told.is_simulated and (near := ratios_off(group.plan for group in told.plan.parts)):
                console.print(near, style="dim", soft_wrap=True)
    else:
        _show_all(told, settings.slowest, console)
    if settings.figure is not None:
        from kvlab.lab.figures import save_figure
        from kvlab.lab.figures.explained import prompt_reasons_figure, request_terms_figure

        drawn = request_terms_figure(told, keys) if keys else prompt_reasons_figure(told)
        save_figure(drawn, Path(settings.figure))
        console.print(f"picture: {settings.figure}")
    return 0
