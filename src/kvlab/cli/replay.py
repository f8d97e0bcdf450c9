"""kvlab replay: the prompt tokens that each eviction policy finds again, over the size of the pool.

kvlab replay workload=multi_turn
kvlab replay workload=multi_turn kv.eviction=lru,s3_fifo kv.num_blocks=100,200,400
kvlab replay workload=mooncake workload.path=conversation.jsonl kv.block_size=512 concurrency=16

Requests go through the prefix index, the allocator and the eviction policy in their order; nothing is computed, no
time passes. Beside the policies stand belady, which knows the future so that none finds more, and the ceiling: what
would be found in a pool that is never full. Settings of `kvlab run` may follow: workload=, kv.block_size=, seed=.
kv.eviction= and kv.num_blocks= take lists here; all policies and six sizes unless given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.cli.settings import command, setting
from kvlab.config.values import at_least, picture_name
from kvlab.errors import ConfigError
from kvlab.registry import registry

if TYPE_CHECKING:
    from kvlab.lab.prefix_replay.curves import ReplayCurves
    from kvlab.lab.terminal import Terminal


@dataclass
class PoolSettings:
    """What a run has one of and a replay several."""

    eviction: list[str] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.eviction:
            if name == "belady":
                text = "knows the future and is in every replay; name policies of a run beside it"
                raise ConfigError("kv.eviction", name, text)
            registry("kv.eviction").check(name)


@dataclass
class ReplaySettings:
    """The settings of a replay beside those of a run."""

    kv: PoolSettings = field(default_factory=PoolSettings)
    concurrency: int = setting(1, "requests that hold their blocks at once; the first to come ends first", "N")
    figure: str | None = setting("replay.png", "the picture; null: none", "FILE")
    json: bool = setting(False, "every figure as JSON; or --json", "true")

    def __post_init__(self) -> None:
        at_least("concurrency", self.concurrency, 1)
        picture_name("figure", self.figure)


def curves(settings: ReplaySettings, overrides: list[str], console: Terminal) -> ReplayCurves:
    """Replay the workload. Raises a KvlabError."""
    from rich.progress import MofNCompleteColumn, Progress

    from kvlab.cli.compose import compose_one
    from kvlab.config.groups import with_settings
    from kvlab.engine.threads import usable_cores
    from kvlab.kv.pools import POOLS
    from kvlab.lab.machine import available_memory
    from kvlab.lab.prefix_replay.curves import replay_curves
    from kvlab.lab.prefix_replay.traffic import read_traffic
    from kvlab.lab.run.requests import lengths_note, requests_of
    from kvlab.workloads.describe import unknown_prompts

    config = compose_one(overrides, "a replay")
    if config.kv.memory is not None:
        raise ConfigError("kv.memory", config.kv.memory, "a replay takes sizes in blocks: kv.num_blocks=1000,10000")
    pool = POOLS.get(config.kv.backend)
    for key, value, works in (
        ("kv.backend", config.kv.backend, pool.is_paged()),
        ("kv.prefix_sharing", config.kv.prefix_sharing, config.kv.prefix_sharing),
    ):
        if not works:
            raise ConfigError(key, value, "keeps no prefixes that could be evicted; take kv=paged")
    for key, kept in config.kv.retention.items():
        text = "a replay compares eviction policies alone, without time, tenants and pins; take kvlab run"
        raise ConfigError(key, kept, f"{text} executor=simulated hardware=h100_sxm")
    if reason := unknown_prompts(config.workload):
        text = f"what would be found again is {reason}; take a workload with prompts, as mooncake or timed_trace"
        raise ConfigError("workload", config.workload.name, text)
    with console.status("reading the workload"):
        block_size = pool.block_size_for(config.kv, config.model.max_seq_len)
        config = with_settings(config, {"executor.kind": "simulated"})  # nothing is computed
        requests = requests_of(config)
        note, traffic = lengths_note(config, requests), read_traffic(requests, block_size)
        del requests  # which may take gigabytes
    if note is not None:
        console.print(note, soft_wrap=True)
    # No thread may draw while processes are made, which would have its locks.
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_interactive
    ) as progress:
        bar = progress.add_task("replaying")
        return replay_curves(
            traffic,
            config.workload.name,
            settings.kv.eviction or registry("kv.eviction").names(),
            settings.kv.num_blocks,
            settings.concurrency,
            cores=usable_cores().logical,
            memory=available_memory("cpu"),
            on_replay=lambda done, of: progress.update(bar, completed=done, total=of, refresh=True),
        )


@command(__doc__, ReplaySettings, bare=False, plugins=True)
def main(settings: ReplaySettings, overrides: list[str]) -> int:
    from kvlab.lab.prefix_replay.curves import show_curves
    from kvlab.lab.terminal import Terminal

    console = Terminal(stderr=settings.json)
    replayed = curves(settings, overrides, console)
    if settings.json:
        print(json.dumps(replayed.as_dict(), indent=2))
    else:
        show_curves(replayed, console)
    if settings.figure is not None:
        from kvlab.lab.figures import save_figure
        from kvlab.lab.figures.hit_rates import hit_rate_figure

        save_figure(hit_rate_figure(replayed), Path(settings.figure))
        console.print(f"picture: {settings.figure}")
    return 0
