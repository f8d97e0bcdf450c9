"""Which prefixes most of a run's prompts have in common: those whose places are worth a look."""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from kvlab.core import Request
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.kv.tiers.base import Key

_MOST = 8  # prefixes
_MOST_BLOCKS = 2**17  # that are looked at


class HotPrefix(NamedTuple):
    """Blocks that several prompts have in common, and that no others follow in all of them."""

    tokens: int
    requests: int
    keys: Sequence[Key]


def hot_prefixes(requests: Sequence[Request], block_size: int) -> list[HotPrefix]:
    """Those of which a cache could spare most tokens, the most first. Of more prompts than can be looked at quickly
    every so many are, each for those between. The turns of a conversation begin as its first.
    """
    first_of = dict[str, str]()
    for request in requests:
        first_of[request.request_id] = first_of.get(request.follows or "", request.request_id)
    turns = Counter(first_of.values())
    firsts = [request for request in requests if request.request_id in turns]
    every = 1 + sum(len(request.prompt_token_ids) for request in firsts) // block_size // _MOST_BLOCKS
    counts, asked, prompts = Counter[Key](), Counter[Key](), list[Sequence[Key]]()
    for first in firsts[::every]:
        prompts.append(RoutedPrompt(first, first.request_id).keys(block_size))
        counts.update(prompts[-1])
        asked.update(dict.fromkeys(prompts[-1], turns[first.request_id]))
    found: dict[Key, HotPrefix] = {}
    for prompt in prompts:
        for count, run in groupby(prompt, counts.__getitem__):
            keys = list(run)
            if count > 1 and len(keys) > len(found.get(keys[0], (0, 0, ()))[2]):
                asking = round(asked[keys[0]] * len(firsts) / len(prompts))
                found[keys[0]] = HotPrefix(len(keys) * block_size, asking, keys)
    return sorted(found.values(), key=lambda prefix: -prefix.tokens * (prefix.requests - 1))[:_MOST]
