"""Advice on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from kvlab.lab.advise.advice import Advice, Figures, gain_text
from kvlab.lab.results.tables import new_table
from kvlab.lab.terminal import Terminal

_CAUSES = 5
_SHOWN = 6  # settings that are listed of those that make no difference


def show(advice: Advice, console: Terminal) -> None:
    """Print the answer, what there is to gain, the changes, and how sure that is."""

    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style)

    line(advice.title, "bold")
    line(advice.traffic.sentence(), "dim")
    line()
    for sentence in advice.sentences():
        line(sentence)
    for text in _headroom(advice):
        line(text, "dim")
    line()
    if advice.proposals:
        console.print(_changes(advice))
        line(f"gain: {advice.goal.unit}, on what it was chosen for and on the other part", "dim")
    for name, settings in (("no difference", advice.no_difference), ("worse", advice.worse)):
        if settings:
            more = f", and {len(settings) - _SHOWN} more" if len(settings) > _SHOWN else ""
            line(f"{name}: {', '.join(settings[:_SHOWN])}{more}", "dim")
    for text, reason in advice.not_tried[:_SHOWN]:
        line(f"not tried: {text}: {reason}", "dim")
    if len(advice.frontier) > 1:
        line()
        console.print(_frontier(advice))
    line()
    line(f"chosen on {advice.chosen_on}; reported on {advice.reported_on}; {advice.simulations} simulations", "dim")
    line(f"how sure: {advice.sure}", "dim")
    for note in advice.notes:
        line(f"note: {note}", "dim")
    if advice.plan.settings:
        line(f"try it: {advice.plan.command}")


def _headroom(advice: Advice) -> Iterator[str]:
    room = advice.headroom
    if room.rates:
        rates = ", ".join(f"{name} {100 * rate:.1f}" for name, rate in room.rates.items())
        yield f"by the ledger, % of prompt tokens found in {room.blocks:,} blocks: {rates}"
    if room.causes:
        causes = "; ".join(f"{100 * share:.0f} % {cause}" for cause, share in list(room.causes.items())[:_CAUSES])
        yield f"time of a request: {causes}"


def _changes(advice: Advice) -> Table:
    priced = advice.today.per_million is not None
    table = new_table("change", overflow="fold")
    for name in ("gain", "again", "of nine in ten", *(["1M tokens"] if priced else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("costs", overflow="fold")
    for proposal in advice.proposals:
        seen = proposal.seen
        table.add_row(
            proposal.settings,
            f"{proposal.gain.value:+.1f}",
            f"{proposal.again.value:+.1f}",
            f"{seen.low:+.0f} to {seen.high:+.0f}",
            *([_price(proposal.figures)] if priced else []),
            proposal.cost,
        )
    plan = advice.plan
    if len(plan.settings) > 1:
        cells = (f"{plan.gain.value:+.1f}", f"{plan.again.value:+.1f}", gain_text(plan.seen).partition(", ")[2])
        table.add_section()
        table.add_row(
            f"the plan: {' '.join(plan.settings)}", *cells, *([_price(plan.figures)] if priced else []), plan.cost
        )
    return table


def _frontier(advice: Advice) -> Table:
    priced = advice.today.per_million is not None
    price = ["1M tokens"] if priced else []
    names = ("devices", "with the plan", "goodput", "ttft p99", "tpot p99", "tokens/s", *price)
    table = new_table(*names, no_wrap=True)
    for row in advice.frontier:
        table.add_row(
            f"{row.devices}",
            row.goal,
            "-" if row.goodput_per_s is None else f"{row.goodput_per_s:.2f}/s",
            f"{row.ttft_ms[1]:,.0f} ms",
            f"{row.tpot_ms[1]:,.1f} ms",
            f"{row.tokens_per_s:,.0f}",
            *([_price(row)] if priced else []),
        )
    return table


def _price(figures: Figures) -> str:
    """Of a million output tokens."""
    return "-" if figures.per_million is None else f"{figures.per_million:,.2f}"
