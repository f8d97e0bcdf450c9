"""A replay's hit rates as a table."""

from kvlab.lab.prefix_replay.curves import ReplayCurves
from kvlab.lab.results.tables import new_table
from kvlab.lab.terminal import Terminal, marked


def show_curves(curves: ReplayCurves, console: Terminal) -> None:
    """Print the hit rates."""
    size = curves.block_size
    console.print(
        marked("[bold]{}[/]: ", curves.workload),
        f"{curves.requests:,} requests, {curves.prompt_tokens:,} prompt tokens, {curves.contents:,} different full "
        f"blocks of {size} tokens; concurrency {curves.concurrency}\n",
        sep="",
    )
    table = new_table("blocks", *curves.hit_rates, "best / belady", justify="right", no_wrap=True)
    for index, blocks in enumerate(curves.num_blocks):
        name, share = curves.best(index)
        rates = (f"{100 * rates[index]:.1f}" for rates in curves.hit_rates.values())
        table.add_row(f"{blocks:,}", *rates, f"{name} {100 * share:.0f} %")
    console.print(table)
    console.print(
        f"% of prompt tokens found in the pool; in one that is never full {100 * curves.ceiling:.1f} %. belady "
        "knows the future: no policy finds more.",
        style="dim",
    )
