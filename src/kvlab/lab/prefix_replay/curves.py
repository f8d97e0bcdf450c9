"""Hit rates over pool sizes: every policy, the optimum, the ceiling."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvlab.errors import ConfigError
from kvlab.lab.prefix_replay.replay import BELADY, Task, replay_all
from kvlab.lab.prefix_replay.reuse import Reuse, reuse
from kvlab.lab.prefix_replay.traffic import Traffic
from kvlab.lab.results.tables import new_table
from kvlab.lab.terminal import Terminal, marked, print_whole

_SIZES = 6


@dataclass(frozen=True, slots=True)
class ReplayCurves:
    """Hit rates as shares of all prompt tokens, at each of `num_blocks`."""

    workload: str
    requests: int
    prompt_tokens: int
    block_size: int
    contents: int  # different full blocks
    concurrency: int
    num_blocks: list[int]
    hit_rates: dict[str, list[float]]  # by policy, with belady
    ceiling: float  # in a pool that is never full
    reuse: Reuse

    def best(self, index: int) -> tuple[str, float]:
        """The policy that finds most at a size, and its share of what belady finds."""
        rates = {name: shares[index] for name, shares in self.hit_rates.items()}
        optimum = rates.pop(BELADY)
        name = max(rates, key=lambda name: rates[name])
        return name, rates[name] / optimum if optimum else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)


def replay_curves(
    traffic: Traffic,
    workload: str,
    policies: Sequence[str],
    num_blocks: Sequence[int] = (),
    concurrency: int = 1,
    *,
    cores: int = 1,
    memory: int | None = None,
    on_replay: Callable[[int, int], None] = lambda done, of: None,
) -> ReplayCurves:
    """Replay traffic under each policy and belady, at each of these sizes, or at six between the longest request
    and all that the workload stores, on so many cores and in so many bytes. `on_replay` is told how many are done.

    Raises ConfigError for a pool that the longest request does not fit in.
    """
    longest = traffic.longest
    for size in num_blocks:
        if size < longest:
            text = f"the workload's longest request takes {longest:,} blocks of {traffic.block_size} tokens"
            raise ConfigError("kv.num_blocks", size, f"{text}; kv.num_blocks={longest} is the least")
    sizes = sorted(set(num_blocks)) or _sizes(longest, traffic.contents + longest)
    names = [*dict.fromkeys(policies), BELADY]
    # Beside its contents a visit takes one block at most: a larger pool is never full.
    tasks = [Task(name, size) for size in sizes if size < traffic.contents + concurrency for name in names]
    blocks_of: dict[Task, int] = {}
    on_replay(0, len(tasks))
    for task, blocks in replay_all(traffic, tasks, concurrency, cores=cores, memory=memory):
        blocks_of[task] = blocks
        on_replay(len(blocks_of), len(tasks))
    rates = {
        name: [traffic.hit_rate(blocks_of.get(Task(name, size), traffic.found_at_most)) for size in sizes]
        for name in names
    }
    counts = len(traffic.visits), traffic.prompt_tokens, traffic.block_size, traffic.contents
    ceiling = traffic.hit_rate(traffic.found_at_most)
    return ReplayCurves(workload, *counts, concurrency, sizes, rates, ceiling, reuse(traffic))


def _sizes(least: int, most: int) -> list[int]:
    """Sizes from `least` to `most`, each the same number of times the one before; two digits between."""
    between = (least * (most / least) ** (step / (_SIZES - 1)) for step in range(1, _SIZES - 1))
    rounded = (round(int(size), 2 - len(str(int(size)))) for size in between)
    return sorted({least, most, *(size for size in rounded if least < size < most)})


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
    print_whole(console, table)
    console.print(
        f"% of prompt tokens found in the pool; in one that is never full {100 * curves.ceiling:.1f} %. belady "
        "knows the future: no policy finds more.",
        style="dim",
    )
