"""What an SGLang server takes by the memory of its device, unless it is told: a step's tokens, and the share of the
memory for weights and cache (`mem_fraction_static`).

Read in the sources of 0.4.0 to 0.5.23 (`server_args.py`, from 0.5.19 `arg_groups/memory_hook.py`):

    until 0.4.7     a share by the number of devices
    until 0.5.2     a reserve by the class of the device and the number of devices
    from 0.5.3      a reserve of 512 MiB, 1.5 for each token of a step, 2 for each sequence of the largest graph and
                    128 for each device, at least 10 GiB of more than 60; with divided attention 3 for each sequence
                    of that graph and each group, 4.5 if it has more than 300
    from 0.5.10     8 MiB more for each graph of prompts, of latent attention 1.5 GiB in all
    from 0.5.20     devices of 20 to 35 GiB have twice the tokens of a step, and larger graphs
    from 0.5.22     no graph for more sequences than may run

Without graphs (--disable-cuda-graph) nothing is kept for those of prompts from 0.5.14, nor 2 MiB for others from
0.5.15. What divided attention has for each sequence of the largest graph stays.

0.5.16 and later can size the cache when graphs have been captured (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING): off by
default, and not here.
"""

from typing import NamedTuple

_BY_RESERVE, _BY_TOKENS, _PROMPT_GRAPHS = (0, 4, 8), (0, 5, 3), (0, 5, 10)
_LARGER, _BOUNDED = (0, 5, 20), (0, 5, 22)
_NO_PROMPT_GRAPHS, _NO_GRAPHS = (0, 5, 14), (0, 5, 15)  # from which on graphs that are off take nothing
_LEAST = 0.001  # of a device that is smaller than the reserve, on which SGLang does not start
_OLD_SHARES = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))  # from so many devices on
_PROMPT_SIZES = (
    *range(4, 33, 4),
    *range(48, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1280, 4097, 256),
)


class _Class(NamedTuple):
    """Devices below so many GiB."""

    below: float
    tokens: int
    graph: int  # sequences of the largest graph
    graph_of_four: int  # the same with four devices and more


def _class(mib: float, version: tuple[int, ...]) -> _Class:
    small = _Class(35, 2_048, 16 if version < (0, 5, 6) else 24, 80)
    if version >= _LARGER:
        small = _Class(35, 4_096, 48, 160)
    classes = (_Class(20, 2_048, 8, 8), small, _Class(60, 4_096, 32, 160), _Class(160, 8_192, 256, 512))
    return next((one for one in classes if mib < 1_024 * one.below), _Class(0, 16_384, 512, 512))


def step_tokens(mib: float, version: tuple[int, ...]) -> int:
    """`chunked_prefill_size` on a device with so many MiB, as nvidia-smi reports them."""
    if version >= _BY_TOKENS:
        return _class(mib, version).tokens
    if version < _BY_RESERVE:
        return 2_048 if mib < 25_000 else 8_192
    return 2_048 if mib < 35 * 1_024 else 8_192 if mib < 160 * 1_024 else 16_384


def static_share(
    mib: float,
    version: tuple[int, ...],
    *,
    tokens: int,
    sequences: int,
    devices: int = 1,
    groups: int = 1,
    latent: bool = False,
    graphs: bool = True,
) -> float:
    """`mem_fraction_static` with steps of so many `tokens` and at most so many running `sequences`, on `devices` of
    so many MiB each, in `groups` that share the sequences, for a model with `latent` attention or without, and a
    server with CUDA `graphs` or without.
    """
    if version < _BY_RESERVE:
        share = next(share for least, share in _OLD_SHARES if devices >= least) if mib <= 81_920 else 0.88
        return min(share + 48 * 1_024 * (1 - share) / mib, 1 - 18 * 1_024 / mib) if mib > 96 * 1_024 else share
    if version < _BY_TOKENS:
        bases = ((35, 2.8 + devices / 10), (90, 9.5 + devices / 2), (160, 12 + devices / 2))
        gib = next((base for below, base in bases if mib < 1_024 * below), 32.0)
        reserve = 1_024 * (gib + (4 if groups > 1 else 0))
    else:
        one = _class(mib, version)
        graph = one.graph_of_four if devices >= 4 else one.graph
        if version >= _BOUNDED:
            graph = min(graph, sequences)
        reserve = 512 + 1.5 * max(tokens, 2_048) + 128 * devices
        if graphs or version < _NO_GRAPHS:
            reserve += 2 * graph
        if groups > 1:
            reserve += graph * groups * (4.5 if graph > 300 else 3)
        if version >= _PROMPT_GRAPHS and (graphs or version < _NO_PROMPT_GRAPHS):
            reserve += 1_536 if latent else 8 * _prompt_graphs(tokens)
        if mib > 60 * 1_024:
            reserve = max(reserve, 10 * 1_024)
    return max(_LEAST, round((mib - reserve) / mib, 3))


def _prompt_graphs(tokens: int) -> int:
    """Graphs of prompts with up to so many tokens."""
    return sum(1 for size in (*_PROMPT_SIZES, *range(4_608, tokens + 1, 512)) if size <= tokens)
