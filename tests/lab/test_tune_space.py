"""What kvlab tune may try on a simulated device."""

from kvlab.lab.campaigns.tune.space import BATCH, TOKENS, build_space
from tests.support.commands import TINY
from tests.support.plans import composed


def test_a_search_begins_at_what_the_server_of_a_large_device_has() -> None:
    """vLLM's on an H100: steps of 8,192 tokens and 1,024 sequences, of which the workload has fewer."""
    traffic = ("workload.num_requests=600", "workload.prompt_len=30")
    config = composed(*TINY, *traffic, "executor=simulated", "hardware=h100_sxm")
    space = build_space(config, 2**30, frozenset())
    assert (space.start[TOKENS], space.start[BATCH]) == (8192, 600)
    assert space.ranges[TOKENS].high == 8192
