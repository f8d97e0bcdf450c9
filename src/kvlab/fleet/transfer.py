"""K and V on their way from one replica to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from kvlab.config.fleet import LinkConfig
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.kv.groups import LayerGroup, layers_per_block
from kvlab.kv.tiers.base import Key, Link
from kvlab.kv.tiers.remote import Offered

#: Predicted seconds to compute a prompt's tokens: given how many are computed before, and how many are to be.
PrefillTime = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Transfer:
    """K and V that went from one replica to another."""

    request_id: str
    source: int
    target: int
    ready_s: float  # when the target had blocks for it
    start_s: float  # when both ends were free
    end_s: float  # or when it broke off
    num_bytes: int  # in all, also if it broke off
    tokens: int = 0  # of a prefix that is pulled from a neighbour


@dataclass(slots=True, eq=False)
class LinkEnd:
    """A replica's side of the links: it sends, or receives, one transfer after the other."""

    _planned: deque[tuple[float, LinkEnd]] = field(default_factory=deque)  # their ends, in order, and other ends

    @property
    def free_s(self) -> float:
        """When all planned transfers have ended."""
        return self._planned[-1][0] if self._planned else 0.0

    def take(self, other: LinkEnd, now: float, end_s: float) -> None:
        """Plan a transfer with `other` that ends at `end_s`, at both ends. Forget those that ended by `now`."""
        for own, its in ((self, other), (other, self)):
            while own._planned and own._planned[0][0] <= now:
                own._planned.popleft()
            own._planned.append((end_s, its))

    def break_off(self, now: float) -> None:
        """Its replica dies, and all transfers end, at their other ends too. Those planned behind them keep their
        times. If one was the last, its time is free again.
        """
        for end_s, other in [planned for planned in self._planned if planned[0] > now]:
            self._planned.remove((end_s, other))
            if (end_s, self) in other._planned:
                other._planned.remove((end_s, self))


def break_off(transfers: list[Transfer], replica: int, now: float) -> None:
    """A replica dies: transfers from and to it end now. Those that have not begun are taken out of the list."""
    for place in reversed(range(len(transfers))):
        sent = transfers[place]
        if replica in (sent.source, sent.target) and sent.end_s > now:
            transfers[place : place + 1] = [replace(sent, end_s=now)] if sent.start_s < now else []


@dataclass(frozen=True, slots=True)
class LinkRate:
    """How long transfers take between replicas of `devices` each: every device sends its own share of the heads, at
    the same time as the others.
    """

    config: LinkConfig
    devices: int
    block_bytes: int  # of all devices
    pieces_per_block: int  # that each device sends
    layers: int = 1  # of the model
    groups: Sequence[LayerGroup] = (LayerGroup((0,)),)  # of layers, each of which has blocks of its own

    def contents(self, routed: RoutedPrompt, size: int) -> dict[Key, Offered]:
        """The contents of a prompt's whole blocks of `size` tokens, one group of layers after another. Of a group
        with a window they are those that a sequence of that length holds. A block that the sender has given back
        with the prompt's last tokens counts as still there.
        """
        count, largest, found = routed.prompt_tokens // size, layers_per_block(self.groups), dict[Key, Offered]()
        for number, group in enumerate(self.groups):
            num_bytes = self.block_bytes * len(group.layers) // largest
            first = group.first_block(count * size, size)
            for place, key in enumerate(routed.keys(size, group=number)[first:], start=first + 1):
                found[key] = Offered(place * size, num_bytes)
        return found

    def seconds(self, num_bytes: int) -> float:
        """How long these bytes of whole blocks take on a free link."""
        config, blocks = self.config, num_bytes / self.block_bytes
        pieces_us = blocks * self.pieces_per_block * config.piece_us
        return (config.setup_us + pieces_us) * 1e-6 + num_bytes / self.devices / (config.gb_s * 1e9)


class PullLink(Link):
    """The way to one replica from whatever has what it pulls. A transfer begins when both ends are free, and keeps
    both busy until its end; `own` is that of the replica. `source` gives the other end, one that is always free
    unless it is given; `note` is told of each transfer its ready_s, start_s, end_s and bytes.

    `prefill_s` predicts what it takes the replica to compute tokens of a prompt; None: it is not asked for.
    """

    def __init__(
        self,
        rate: LinkRate,
        prefill_s: PrefillTime | None = None,
        *,
        own: LinkEnd | None = None,
        source: Callable[[], LinkEnd] = LinkEnd,
        note: Callable[[float, float, float, int], None] = lambda *transfer: None,
    ) -> None:
        self._rate, self._prefill_s, self._source, self._note = rate, prefill_s, source, note
        self.own = own or LinkEnd()

    def beats_prefill(self, now: float, size: int, before: int, spared: int, pulled: int) -> bool:
        """Whether `pulled` blocks of `size` tokens, asked for now, come sooner than the `spared` blocks of a
        prompt are computed, `before` others before them: with what the transfer waits for.
        """
        if self._prefill_s is None:
            return True
        wait_s = max(self._source().free_s, self.own.free_s, now) - now
        pull_s = wait_s + self.seconds(pulled * self._rate.block_bytes)
        return pull_s < self._prefill_s(before * size, spared * size)

    def transfer(self, ready_s: float, num_bytes: int) -> float:
        source = self._source()
        start_s = max(ready_s, source.free_s, self.own.free_s)
        end_s = start_s + self.seconds(num_bytes)
        self.own.take(source, ready_s, end_s)
        self._note(ready_s, start_s, end_s, num_bytes)
        return end_s

    def seconds(self, num_bytes: int) -> float:
        return self._rate.seconds(num_bytes)
