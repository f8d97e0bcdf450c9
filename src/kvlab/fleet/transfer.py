"""K and V on their way from one replica to another."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvlab.config.fleet import LinkConfig
from kvlab.fleet.prefixes import RoutedPrompt
from kvlab.kv.groups import LayerGroup, layers_per_block
from kvlab.kv.tiers.base import Key, Link
from kvlab.kv.tiers.remote import Offered

#: Seconds that a replica is predicted to take for so many tokens of a prompt, which are behind so many others.
PrefillTime = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer that was made."""

    request_id: str
    source: int  # the replica that computed
    target: int  # the one that decodes
    ready_s: float  # when the target had room for it
    start_s: float  # when both ends were free
    end_s: float  # or when it broke off
    num_bytes: int  # that were to be sent
    tokens: int = 0  # of a prefix that another replica had


@dataclass(slots=True)
class LinkEnd:
    """A replica's side of the links: it sends, or receives, one transfer after the other."""

    _ends_s: deque[float] = field(default_factory=deque)  # of what is planned, in order

    @property
    def free_s(self) -> float:
        """When what is planned has ended."""
        return self._ends_s[-1] if self._ends_s else 0.0

    def take(self, now: float, end_s: float) -> None:
        """A transfer is planned that ends then. Nothing breaks off before `now`."""
        while self._ends_s and self._ends_s[0] <= now:
            self._ends_s.popleft()
        self._ends_s.append(end_s)

    def cut(self, end_s: float) -> None:
        """A transfer breaks off that was to end then. What was planned behind it keeps its time; without any, this
        end is free.
        """
        if end_s in self._ends_s:
            self._ends_s.remove(end_s)

    def clear(self) -> None:
        """All that is planned breaks off."""
        self._ends_s.clear()


def break_off(
    transfers: list[Transfer], replica: int, now: float, ends: Callable[[Transfer], Iterable[LinkEnd]]
) -> None:
    """A replica dies: transfers from and to it end now, which frees their `ends` (see LinkEnd.cut); those that have
    not begun are none.
    """
    for place in reversed(range(len(transfers))):
        sent = transfers[place]
        if replica in (sent.source, sent.target) and sent.end_s > now:
            for end in ends(sent):
                end.cut(sent.end_s)
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
        """What is sent of a prompt's whole blocks of `size` tokens, a group's behind another's: of layers with a
        window those that a sequence of so many tokens holds. One that the sender has given back with the prompt's
        last tokens counts as still there.
        """
        count, largest, found = routed.prompt_tokens // size, layers_per_block(self.groups), dict[Key, Offered]()
        for number, group in enumerate(self.groups):
            num_bytes = self.block_bytes * len(group.layers) // largest
            first = group.first_block(count * size, size)
            for place, key in enumerate(routed.keys(size, group=number)[first:], start=first + 1):
                found[key] = Offered(place * size, num_bytes)
        return found

    def seconds(self, num_bytes: int) -> float:
        """How long so many bytes take, those of whole blocks, with nothing before them."""
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
        """See Link."""
        source = self._source()
        start_s = max(ready_s, source.free_s, self.own.free_s)
        end_s = start_s + self.seconds(num_bytes)
        for end in (source, self.own):
            end.take(ready_s, end_s)
        self._note(ready_s, start_s, end_s, num_bytes)
        return end_s

    def seconds(self, num_bytes: int) -> float:
        """See Link."""
        return self._rate.seconds(num_bytes)
