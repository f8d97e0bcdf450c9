"""estimated: llm-d's scores, with prefixes by what was sent before."""

from collections.abc import Mapping
from typing import ClassVar

from kvlab.fleet.routers import ROUTERS
from kvlab.fleet.weighted import Weighted


@ROUTERS.register("estimated")
class Estimated(Weighted):
    """llm-d without KV events: 1 x prefix + 1 x free memory + 1 x short queue. It remembers 31,250 blocks of 64
    characters, 16 tokens, of each replica, and compares the first 256 of a prompt. Of those that it sent longest
    ago it forgets the beginning first: its indexer adds a prompt's blocks in order. What is left of a prompt counts
    as long as another replica's memory has the beginning (`matchLongestPrefix` in the prefix plugin of
    gateway-api-inference-extension 0.5.1).
    """

    prefixes = "memory"
    memory = (16, 31_250, 256)
    keeps_heads = False
    usual: ClassVar[Mapping[str, float]] = {"prefix": 1.0, "kv": 1.0, "queue": 1.0}
