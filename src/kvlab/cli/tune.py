"""kvlab tune: search the batch, blocks, block size and token budget that are best within a memory.

kvlab tune optimize=throughput/output_tokens_per_s memory=2GiB
kvlab tune optimize=latency/e2el_ms_p99 memory=1GiB trials=40 model=qwen3_0_6b workload=mixed32
kvlab tune optimize=throughput/output_tokens_per_s memory=512MiB kv.block_size=16      leaves one as it is

Any setting of `kvlab run` may follow. The same command goes on where it was stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlab.cli.settings import read_settings, run_command, setting
from kvlab.config import parse_bytes
from kvlab.errors import ConfigError

_REFUSED = dict.fromkeys(
    ("sweep", "resume", "repeat", "hydra.mode"),
    "has no place in a search; it resumes by itself, and makes its own runs",
) | {"kv.memory": "a search chooses the cache's size; give memory=SIZE for all, or kv.num_blocks"}


@dataclass
class TuneSettings:
    """The settings of a search beside those of its runs."""

    optimize: str = setting("", "any metric of docs/metrics.md that is better when it is more, or less", "METRIC")
    memory: str | None = setting(
        None, "for weights, cache and working memory; else what this machine has free", "SIZE"
    )
    trials: int = setting(20, "configurations to measure, those of earlier searches included; 20 unless given", "N")
    storage: str | None = setting(
        None, "Optuna's database; an SQLite file in the output folder unless given", "URL"
    )
    output: str = setting("outputs/tune", "where results go; outputs/tune unless given", "DIR")

    def __post_init__(self) -> None:
        from kvlab.lab.catalogue import direction

        if self.memory is not None:
            parse_bytes(self.memory, key="memory")
        if self.trials < 1:
            raise ConfigError("trials", self.trials, "must be a whole number, at least 1")
        if not self.optimize:
            raise ConfigError("optimize", None, "name a metric, such as optimize=throughput/output_tokens_per_s")
        if direction(self.optimize).more_is_better is None:
            examples = "throughput/output_tokens_per_s, latency/ttft_ms_p99, latency/e2el_ms_p50"
            text = "no such metric, or neither more nor less of it is better; there are"
            raise ConfigError("optimize", self.optimize, f"{text} {examples} and others in docs/metrics.md")


def read_arguments(arguments: list[str]) -> tuple[TuneSettings, list[str]]:
    """The search's own settings, and the overrides of its runs. Raises ConfigError."""
    settings, overrides = read_settings(TuneSettings, arguments)
    for override in overrides:
        key, _, value = override.partition("=")
        if key in _REFUSED:
            raise ConfigError(key, value, _REFUSED[key])
    return settings, overrides


def _answer(arguments: list[str]) -> int:
    settings, overrides = read_arguments(arguments)
    # Imported this late so that a mistake is answered at once.
    from kvlab.cli.search import Search
    from kvlab.lab.terminal import Terminal

    return Search(settings, overrides, Terminal()).run()


def main() -> None:
    """Run the command line."""
    run_command(__doc__, TuneSettings, _answer)
