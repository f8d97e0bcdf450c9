"""What was watched, in sentences."""

from statistics import median

from kvlab.lab.terminal import Terminal
from kvlab.lab.watch.server_metrics import ServerMetrics
from kvlab.lab.watch.view import ServerPool, Verdict


def line(pool: ServerPool, metrics: ServerMetrics | None) -> str:
    """The pool at this moment."""
    of = f" of {metrics.blocks:,}" if metrics is not None and metrics.blocks else ""
    said = f"{len(pool.now):,}{of} blocks, {pool.stored:,} stored, {pool.removed:,} evicted"
    if metrics is not None and metrics.running is not None:
        said += f"; {metrics.running:.0f} running, {metrics.waiting or 0:.0f} waiting"
    return said + (f"; {pool.missed:,} batches missed" if pool.missed else "")


def show(pool: ServerPool, metrics: ServerMetrics | None, console: Terminal) -> None:
    """What the events told, and the server's own metrics."""
    said = [
        f"{pool.batches:,} batches of events: {pool.stored:,} blocks stored, {pool.removed:,} evicted, "
        f"{len(pool.now):,} there at the end, {pool.peak:,} at most"
    ]
    if pool.gaps:
        said.append(f"{pool.missed:,} batches were missed, in {pool.gaps:,} gaps: what they had is not known")
    if pool.unknown:
        said.append(f"{pool.unknown:,} evicted blocks were stored before, or in what was missed")
    if pool.again_s:
        share = 100 * len(pool.again_s) / max(pool.removed, 1)
        said.append(
            f"{len(pool.again_s):,} blocks, {share:.1f} % of those evicted, were stored again: "
            f"{median(pool.again_s):,.1f} s later in the median, {min(pool.again_s):,.1f} s at least"
        )
    if metrics is not None and metrics.prompt_tokens:
        share = 100 * (metrics.hit_tokens or 0) / metrics.prompt_tokens
        said.append(f"its own metrics: {share:.1f} % of {metrics.prompt_tokens:,.0f} prompt tokens found")
    for sentence in said:
        console.print(sentence)


def show_verdict(held: Verdict, pool: ServerPool, console: Terminal) -> None:
    """How far recorded requests agree with the events."""
    if held.unsaid:
        advice = (
            "clients of streams ask with include_usage, and vLLM is started with --enable-prompt-tokens-details"
        )
        console.print(f"{held.unsaid:,} recorded requests do not say what the server found; {advice}")
    count = held.agree + held.more + held.less
    said, there = (100 * tokens / max(held.prompt_tokens, 1) for tokens in (held.said_tokens, held.there_tokens))
    share = 100 * held.unasked_blocks / max(len(pool.now), 1)
    if count:
        console.print(
            f"{count:,} recorded requests: the server found {said:.1f} % of their prompt tokens; by its events "
            f"{there:.1f} % were there when they came. Both agree in {held.agree:,} requests; in {held.more:,} it "
            f"found more, in {held.less:,} less"
        )
    console.print(f"{share:.1f} % of the blocks that are there were asked for by one request alone")
