"""A run's workload, shown and drawn without serving it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvlab.config import RunConfig, WorkloadConfig
from kvlab.core import Request
from kvlab.kv.pools import POOLS
from kvlab.lab.files import check_directory
from kvlab.lab.results.tables import count, new_table
from kvlab.lab.run.requests import lengths_note, requests_of
from kvlab.lab.terminal import Terminal, marked
from kvlab.workloads.describe import unknown_prompts
from kvlab.workloads.prefixes import PrefixTree, prefix_tree


def dry_run(config: RunConfig, directory: Path, console: Terminal) -> None:
    """Print a run's workload and draw it into `workload.png` in `directory`. No model is built, nothing is tracked.

    Raises a KvlabError for a workload that cannot be made and a directory that cannot be written to.
    """
    check_directory("hydra.run.dir", directory)
    requests = requests_of(config)
    block_size = POOLS.get(config.kv.backend).block_size_for(config.kv, config.model.max_seq_len)
    tree = prefix_tree(requests, block_size)
    _print(config.workload, requests, tree, console)
    if note := lengths_note(config, requests):
        console.print(note, soft_wrap=True)
    from kvlab.lab.figures import save_figures  # Matplotlib takes half a second to import
    from kvlab.lab.figures.workload import workload_figure

    (file,) = save_figures(
        {"workload": workload_figure(requests, tree, unknown_prompts(config.workload))}, directory
    )
    console.print(f"drawn: {file}", soft_wrap=True)


def _print(workload: WorkloadConfig, requests: list[Request], tree: PrefixTree, console: Terminal) -> None:
    arrivals = [request.arrival_s for request in requests if request.follows is None]
    outputs, last_s, closed = [r.expected_tokens for r in requests], arrivals[-1], workload.concurrency
    table = new_table(workload.name, "mean", "min", "p50", "p90", "p99", "max")
    rows: list[tuple[str, Sequence[float], int]]
    rows = [("prompt, tokens", tree.tokens, 0), ("output, tokens", outputs, 0)]
    if last_s:
        rows.append(("between arrivals, s", np.diff(arrivals).tolist(), 3))
    for name, values, digits in rows:
        figures = (np.mean(values), *np.percentile(values, (0, 50, 90, 99, 100)))
        table.add_row(name, *(f"{figure:,.{digits}f}" for figure in figures))
    console.print(table)
    blocks, repeated = sum(tree.blocks), sum(tree.repeated)
    # A file has prompts, and the answers that later ones repeat in these alone: a server has them in its cache.
    bound = "none is higher" if workload.path is None else "higher only by answers that later prompts repeat"
    shared = {
        "prompt blocks": f"{blocks:,} of {count(tree.block_size, 'token')}, {blocks - repeated:,} distinct",
        "blocks that occur before": f"{100 * tree.repeated_share:.1f} %",
        "tree of prefixes": f"{max(tree.blocks):,} blocks deep, shared down to {max(tree.repeated):,}",
        "hit rate without a memory limit": f"{100 * tree.most_hit_rate:.1f} % of prompt tokens; {bound}",
    }
    if reason := unknown_prompts(workload):
        shared = {
            "prompt blocks": f"{blocks:,} of {count(tree.block_size, 'token')}",
            "hit rate without a memory limit": reason,
        }
    for name, text in {
        "requests": f"{len(requests):,}" + (f", at most {closed:,} at once" if closed else ""),
        "arrivals": f"within {last_s:,.1f} s, {len(arrivals) / last_s:,.2f} per s" if last_s else "all at once",
        "tokens": f"{sum(tree.tokens):,} of prompts, {sum(outputs):,} of outputs",
        **shared,
    }.items():
        console.print(marked("[bold]{}[/]: {}", name, text))
