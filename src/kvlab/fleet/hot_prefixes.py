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
    every so many are.
    """
    blocks = sum(len(request.prompt_token_ids) for request in requests) // block_size
    every = requests[:: 1 + blocks // _MOST_BLOCKS]
    prompts = [RoutedPrompt(request, request.request_id).keys(block_size) for request in every]
    counts = Counter(key for keys in prompts for key in keys)
    found: dict[Key, HotPrefix] = {}
    for prompt in prompts:
        for count, run in groupby(prompt, counts.__getitem__):
            keys = list(run)
            if count > 1 and len(keys) > len(found.get(keys[0], (0, 0, ()))[2]):
                found[keys[0]] = HotPrefix(len(keys) * block_size, count, keys)
    return sorted(found.values(), key=lambda prefix: -prefix.tokens * (prefix.requests - 1))[:_MOST]
