"""Reuse distances: how many other blocks come between two uses of one (Mattson et al., 1970)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvlab.lab.prefix_replay.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Reuse:
    """Blocks that prompts look up: `first` were not there before; of the others `blocks[i]` are found by a pool of
    `edges[i + 1] - 1` blocks that gives up the least recently used, and not by one of `edges[i] - 1`.
    """

    first: int
    edges: list[int]
    blocks: list[int]


def reuse(traffic: Traffic) -> Reuse:
    """The distances of a workload's blocks, in classes each half as wide again as the one before."""
    distances = reuse_distances(traffic)
    needed = distances[distances >= 0] + 1
    edges = np.unique(np.ceil(2 ** np.arange(0, 2 * np.log2(traffic.contents + 2) + 1, 0.5)).astype(np.int64))
    edges = edges[: np.searchsorted(edges, needed.max(initial=1), side="right") + 1]
    blocks, _ = np.histogram(needed, edges)
    return Reuse(int((distances < 0).sum()), edges.tolist(), blocks.tolist())


def reuse_distances(traffic: Traffic) -> NDArray[np.int64]:
    """Of each block that a prompt looks up, in order, how many different blocks were used since it was; -1: it was
    not there before. A pool of more blocks finds it, if it gives up the least recently used, of one visit its ends
    first. One pass in O(n log n) of the n blocks of all visits.
    """
    total = sum(len(visit.contents) for visit in traffic.visits)
    # A Fenwick tree over uses, with 1 where a content was used last: sums of its end are distances.
    tree = np.zeros(total + 1, dtype=np.int64)
    last = np.zeros(traffic.contents, dtype=np.int64)  # 1, 2 ...; 0: never
    levels = int(total).bit_length()
    used = known = 0

    def add(places: NDArray[np.int64], value: int) -> None:
        for _ in range(levels):
            places = places[places <= total]
            np.add.at(tree, places, value)
            places = places + (places & -places)

    distances = []
    for visit in traffic.visits:
        looked_up = last[visit.contents[: visit.looked_up]]
        before, at = np.zeros(len(looked_up), dtype=np.int64), looked_up
        while at.any():
            before += tree[at]  # tree[0] is 0
            at = at & (at - 1)
        distances.append(np.where(looked_up > 0, known - before, -1))
        again = last[visit.contents]
        again = again[again > 0]
        add(again, -1)
        count = len(visit.contents)
        last[visit.contents] = np.arange(used + count, used, -1)  # the first is used last
        add(last[visit.contents], 1)
        used, known = used + count, known + count - len(again)
    return np.concatenate(distances) if distances else np.zeros(0, dtype=np.int64)
