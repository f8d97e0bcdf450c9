"""Advice on the terminal, and its tables, which the page has too."""

from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.table import Table

from kvlab.lab.advise.advice import Advice, Figures
from kvlab.lab.results.catalogue import metric
from kvlab.lab.results.tables import new_table
from kvlab.lab.terminal import Terminal

_CAUSES = 5
_SHOWN = 6  # settings that are listed of those that make no difference, are worse, or were not tried
_ON_PAGE = ("ttft p50", "tpot p50")  # columns that are on the page alone
_WIDE = ("change", "costs")  # columns of text
_GOODPUT, _THROUGHPUT = metric("slo/goodput_per_s"), metric("throughput/output_tokens_per_s")

Row = dict[str, str]  # by column


def change_rows(advice: Advice) -> Iterator[Row]:
    """A row for each change, and one for a plan of several."""
    for each in (*advice.proposals, *[advice.plan] * (len(advice.plan.settings) > 1)):
        yield {
            "change": each.text if each in advice.proposals else f"the plan: {each.text}",
            "gain": f"{each.gain.value:+.1f}",
            "again": f"{each.again.value:+.1f}",
            "of nine in ten": f"{each.seen.low:+.0f} to {each.seen.high:+.0f}",
            **_figures(each.figures),
            "costs": each.cost,
        }


def frontier_rows(advice: Advice) -> Iterator[Row]:
    """A row for each number of devices."""
    for row in advice.frontier:
        yield {
            "devices": f"{row.devices}",
            "with the plan": row.goal,
            "goodput": "-" if row.goodput_per_s is None else f"{_GOODPUT.text(row.goodput_per_s, unit=False)}/s",
            "tokens/s": _THROUGHPUT.text(row.tokens_per_s, digits=0, unit=False),
            **_figures(row),
        }


def _figures(figures: Figures) -> Row:
    row = Row()
    for name, values, digits in (("ttft", figures.ttft_ms, 0), ("tpot", figures.tpot_ms, 1)):
        row |= {f"{name} {p}": f"{value:,.{digits}f} ms" for p, value in zip(("p50", "p99"), values, strict=True)}
    price = figures.per_million
    return row if price is None else row | {"1M tokens": f"{price:,.2f}"}


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
        console.print(_table(change_rows(advice), (*_ON_PAGE, "ttft p99", "tpot p99")))
        line(f"gain: {advice.goal.unit}, on what it was chosen for and on the other part", "dim")
    for text in _others(advice):
        line(text, "dim")
    if len(advice.frontier) > 1:
        line()
        console.print(_table(frontier_rows(advice), _ON_PAGE))
        line(f"each of these on {advice.first}", "dim")
    line()
    line(f"chosen on {advice.chosen_on}; reported on {advice.reported_on}; {advice.simulations} simulations", "dim")
    line(f"how sure: {advice.sure}", "dim")
    for note in advice.notes:
        line(f"note: {note}", "dim")
    if advice.plan.settings:
        console.print(f"try it: {advice.plan.command}", soft_wrap=True)  # as one line, to be copied


def _others(advice: Advice) -> Iterator[str]:
    """What else there is to change, the first of each kind and how many more there are."""

    def first(settings: Sequence[str]) -> list[str]:
        more = len(settings) - _SHOWN
        return [*settings[:_SHOWN], *([f"and {more} more, in advice.html"] if more > 0 else [])]

    for name, settings in (("no difference", advice.no_difference), ("worse", advice.worse)):
        if settings:
            yield f"{name}: {', '.join(first(settings))}"
    for text in first([": ".join(each) for each in advice.not_tried]):
        yield f"not tried: {text}"


def _headroom(advice: Advice) -> Iterator[str]:
    room = advice.headroom
    if room.rates:
        rates = ", ".join(f"{name} {100 * rate:.1f}" for name, rate in room.rates.items())
        yield f"by the ledger, % of prompt tokens found in {room.blocks:,} blocks: {rates}"
    if room.blocks_for:
        sizes = ", ".join(f"{share} in {blocks:,}" for share, blocks in room.blocks_for.items())
        yield f"blocks in which lru finds a part of all that there is: {sizes}"
    if room.causes:
        causes = "; ".join(f"{100 * share:.0f} % {cause}" for cause, share in list(room.causes.items())[:_CAUSES])
        yield f"time of a request: {causes}"


def _table(rows: Iterable[Row], left_out: Collection[str]) -> Table:
    shown = [{name: cell for name, cell in row.items() if name not in left_out} for row in rows]
    table = new_table(*shown[0], overflow="fold")
    for column in table.columns:
        is_wide = column.header in _WIDE
        column.no_wrap, column.justify = not is_wide, "left" if is_wide else "right"
    for row in shown:
        table.add_row(*row.values())
    return table
