"""kvlab tune: search the settings that are best within a memory, the largest rate, the fewest replicas, the split.

kvlab tune optimize=throughput/output_tokens_per_s memory=2GiB
kvlab tune optimize=latency/e2el_ms_p99 memory=1GiB trials=40 model=qwen3_0_6b workload=mixed32
kvlab tune optimize=throughput/output_tokens_per_s memory=512MiB kv.block_size=16      leaves one as it is
kvlab tune slo.ttft_ms=500 slo.tpot_ms=50 workload=mixed32                             the most goodput
kvlab tune find=rate slo.ttft_ms=500 slo.tpot_ms=50 workload=mixed32                   the largest workload.rate
kvlab tune find=replicas slo.ttft_ms=500 hardware=h100_sxm                             the least fleet.replicas
kvlab tune find=split slo.ttft_ms=500 fleet.replicas=8 hardware=h100_sxm               the best fleet.prefill

Any setting of `kvlab run` may follow. The same command goes on where it was stopped.
"""

from collections.abc import Sequence

from kvlab.cli.settings import command
from kvlab.errors import ConfigError
from kvlab.lab.campaigns.tune.settings import TuneSettings
from kvlab.lab.settings import key_of

_REFUSED = dict.fromkeys(
    ("sweep", "resume", "repeat", "hydra.mode"),
    "has no place in a search; it resumes by itself, and makes its own runs",
) | {"kv.memory": "a search chooses the cache's size; give memory=SIZE for all, or kv.num_blocks"}


def check(settings: TuneSettings, overrides: Sequence[str]) -> None:
    """Raise ConfigError for a search without an aim, or with overrides that its runs cannot have."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key in _REFUSED:
            raise ConfigError(key, value, _REFUSED[key])
    has_limits = any(key_of(override).startswith("slo.") for override in overrides)
    if not settings.optimize and settings.find is None and not has_limits:
        text = "name a metric, as optimize=throughput/output_tokens_per_s, or give limits, as slo.ttft_ms=500"
        raise ConfigError("optimize", None, text)


@command(__doc__, TuneSettings)
def main(settings: TuneSettings, overrides: list[str]) -> int:
    check(settings, overrides)
    # Imported this late so that a mistake is answered at once.
    from kvlab.cli.compose import compose_run
    from kvlab.lab.terminal import Terminal

    if settings.find is not None:
        from kvlab.lab.campaigns.tune.searches import RateSearch, ReplicaSearch, SplitSearch

        kinds = {search.find: search for search in (RateSearch, ReplicaSearch, SplitSearch)}
        return kinds[settings.find](settings, overrides, compose_run, Terminal()).run()
    from kvlab.lab.campaigns.tune.search import Search

    return Search(settings, overrides, compose_run, Terminal()).run()
