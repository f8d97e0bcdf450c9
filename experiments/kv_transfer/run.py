"""How long K and V take from one replica to another, beside published transfers."""

from __future__ import annotations

from typing import NamedTuple

from kvlab.config.fleet import LinkConfig
from kvlab.fleet.transfer import LinkRate

BLOCK = 16


class Published(NamedTuple):
    """A series of transfers that others measured, and the link that describes it."""

    source: str
    token_bytes: int  # K and V of all layers
    devices: int
    pieces_per_block: int  # that each device sends
    link: LinkConfig
    measured_ms: dict[int, float]  # by tokens of the prompt
    computed_ms: dict[int, float]  # the same prompts, computed


SERIES = (
    Published(
        "llm-d, pull from a neighbour: gpt-oss 120B, H200",
        36 * 2 * 8 * 64 * 2,
        1,
        1,
        LinkConfig(gb_s=17.0, setup_us=26_000, piece_us=0.0),
        {2_000: 35, 8_000: 57, 16_000: 86, 32_000: 165, 48_000: 235},
        {2_000: 78, 8_000: 250, 16_000: 510, 32_000: 1_173, 48_000: 1_988},
    ),
    Published(
        "Mooncake, prefill to decode: Qwen3 8B, H800, RDMA",
        36 * 2 * 8 * 128 * 2,
        1,
        1,
        LinkConfig(gb_s=155.0, setup_us=420, piece_us=0.0),
        {128: 0.54, 32_768: 31.65},
        {128: 46, 32_768: 750},
    ),
)


def main() -> None:
    """Print each series as a table."""
    for series in SERIES:
        rate = LinkRate(series.link, series.devices, BLOCK * series.token_bytes, series.pieces_per_block)
        print(
            f"{series.source}\n| tokens | published, ms | kvlab, ms | error | computed, ms |\n|---|---|---|---|---|"
        )
        for tokens, measured in series.measured_ms.items():
            predicted = 1000 * rate.seconds(-(-tokens // BLOCK) * BLOCK * series.token_bytes)
            computed = series.computed_ms.get(tokens, "-")
            print(f"| {tokens:,} | {measured} | {predicted:.2f} | {predicted / measured - 1:+.0%} | {computed} |")
        print()


if __name__ == "__main__":
    main()
