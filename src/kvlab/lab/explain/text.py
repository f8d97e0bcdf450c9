"""An explanation for people, and as JSON: where time and prompt tokens went, and what would have helped."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvlab.fleet.dispatcher import Routed
from kvlab.lab.explain.changes import Change
from kvlab.lab.explain.lives import Life
from kvlab.lab.explain.replayed import Explanation
from kvlab.lab.results.requests import SampleKey
from kvlab.lab.results.tables import new_table
from kvlab.lab.terminal import Terminal

_LEAST_SHOWN = 0.005  # of the time
_MOST_HOLDERS = 3
_MOST_SCORES = 8  # of replicas
_STAGES = {"all": "", "prefill": "its prompt ", "decode": "with its prompt computed "}
_MOST_MS = 100_000.0  # longer times are shown in seconds


def show_terms(terms: Mapping[Any, float], console: Terminal, unit: str, per: int = 1) -> None:
    """Terms with their shares, the longest first."""
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


def show_all(told: Explanation, slowest: int, console: Terminal) -> None:
    """All requests, and the slowest."""
    count = len(told.lives)
    console.print(f"{count:,} requests on {told.plan.machine}; of a request, in the mean:\n")
    show_terms(told.terms_ms(), console, "its time went into", max(count, 1))
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


def _show_mostly(title: str, rows: dict[str, list[SampleKey]], told: Explanation, console: Terminal) -> None:
    """The mean time of these requests, and the two terms that have most of it."""
    table = new_table(title, "ms", no_wrap=True)
    table.add_column("mostly")
    for name, keys in rows.items():
        count, terms = len(keys), told.terms_ms(set(keys))
        mostly = "; ".join(f"{cause} {value / count:,.0f}" for cause, value in list(terms.items())[:2])
        table.add_row(name, f"{sum(map(told.latency_ms, keys)) / count:,.0f}", mostly)
    console.print()
    console.print(table)


def show_one(told: Explanation, key: SampleKey, console: Terminal) -> None:
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
    show_terms(told.terms_of(key), console, "from arrival to end")
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


def show_changes(changes: list[Change], name: str, console: Terminal) -> None:
    """What each change would have saved."""
    table = new_table("ms, simulated", name, "saved", "all", "saved", "p99", no_wrap=True)
    base = changes[0]
    for change in changes:
        row = [change.settings or change.what]
        for value, before in ((change.asked_ms, base.asked_ms), (change.mean_ms, base.mean_ms)):
            row += [f"{value:,.0f}", "" if change is base else f"{before - value:+,.0f}"]
        table.add_row(*row, f"{change.p99_ms:,.0f}")
    console.print()
    console.print(table)


def as_json(told: Explanation, keys: list[SampleKey], changes: list[Change]) -> dict[str, Any]:
    """Every figure: of all requests, and of these."""
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
