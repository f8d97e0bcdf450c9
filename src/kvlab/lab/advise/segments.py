"""The traffic in two parts: one that advice is chosen on, and one that it is reported on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvlab.config import WorkloadConfig
from kvlab.core import Request
from kvlab.errors import WorkloadError
from kvlab.lab.advice_line import FEWEST
from kvlab.lab.results.tables import count

_BUSY = 90  # percentile of the load of windows, at which one is taken where not all can be simulated
_APART_S = 86_400.0
_WARM = 0.15  # share of a window's requests that fill the cache and are not counted


@dataclass(frozen=True, slots=True)
class Segment:
    """Requests that are served from an empty cache on. `counted` are the ids of those whose latencies count."""

    name: str
    requests: list[Request]
    counted: frozenset[str]
    seconds: tuple[float, float] | None = None  # of the trace; None: drawn, or all at once

    @property
    def text(self) -> str:
        """Which requests these are."""
        text = f"{self.name}: {len(self.requests):,} requests"
        return text if self.seconds is None else "{}, {:,.0f} to {:,.0f} s".format(text, *self.seconds)


def halves(
    workload: WorkloadConfig, requests: Sequence[Request], again: Sequence[Request] | None, most: int
) -> tuple[Segment, Segment]:
    """Two parts, of no more than about `most` requests each. Requests that are drawn are drawn `again` with another
    seed. A trace is cut in the middle of its time: where a half has more than `most`, it is its window with the
    load that one in ten exceeds, of which the first requests fill the cache. Of a trace without times all requests
    are both parts.

    Raises WorkloadError for traffic that is too short to say anything.
    """
    if len(requests) < FEWEST:
        text = f"has {count(len(requests), 'request')}, and fewer than {FEWEST} are too few to say anything"
        raise WorkloadError(f"workload.name={workload.name}: {text}")
    if again is not None:
        return _drawn("requests as drawn", requests, most), _drawn(
            "requests drawn again with another seed", again, most
        )
    families = _families(requests)
    last = families[-1][0].arrival_s
    if not last:
        whole = _drawn("all requests, which arrive at once", requests, most)
        return whole, whole
    parts = [
        [family for family in families if (family[0].arrival_s < last / 2) is first] for first in (True, False)
    ]
    if min(sum(map(len, part)) for part in parts) < FEWEST // 2:
        text = f"has too few requests in one half of its {last:.3g} s to choose in one and report on the other"
        raise WorkloadError(f"workload.name={workload.name}: {text}; set a workload.window")
    return _window("the first half", parts[0], most), _window("the second half", parts[1], most)


def alone(segment: Segment, most: int) -> Segment:
    """Some conversations of a segment, evenly, so far apart that each has an engine to itself."""
    families = _families(segment.requests)
    chosen = families[:: max(1, len(families) // most)]
    apart = [_moved(family, _APART_S * at - family[0].arrival_s) for at, family in enumerate(chosen)]
    return _segment("alone", apart)


def _families(requests: Sequence[Request]) -> list[list[Request]]:
    """Conversations in the order of their first requests, by arrival."""
    of: dict[str, list[Request]] = {}
    found: list[list[Request]] = []
    for request in requests:
        if request.follows is None:
            found.append(family := [request])
        else:
            (family := of[request.follows]).append(request)
        of[request.request_id] = family
    return sorted(found, key=lambda family: family[0].arrival_s)


def _drawn(name: str, requests: Sequence[Request], most: int) -> Segment:
    families = _families(requests)
    sizes = np.cumsum(list(map(len, families)))
    return _segment(name, families[: max(1, int(np.searchsorted(sizes, most, side="right")))])


def _window(name: str, families: list[list[Request]], most: int) -> Segment:
    sizes = np.cumsum([0, *map(len, families)])
    if sizes[-1] > most:
        first, end = _busy(families, sizes, most)
        families, name = families[first:end], f"a busy window of {name}"
    start_s, end_s = families[0][0].arrival_s, families[-1][0].arrival_s
    moved = [_moved(family, -start_s) for family in families]
    return _segment(name, moved, int(_WARM * len(moved)), (start_s, end_s))


def _moved(family: list[Request], by_s: float) -> list[Request]:
    return [replace(family[0], arrival_s=family[0].arrival_s + by_s), *family[1:]]


def _segment(
    name: str, families: list[list[Request]], warm: int = 0, seconds: tuple[float, float] | None = None
) -> Segment:
    """Conversations, of which the first `warm` are not counted; what follows another is behind all that do not."""
    requests = [family[0] for family in families] + [request for family in families for request in family[1:]]
    counted = frozenset(request.request_id for family in families[warm:] for request in family)
    return Segment(name, requests, counted, seconds)


def _busy(families: list[list[Request]], sizes: np.ndarray, most: int) -> tuple[int, int]:
    """The window of about `most` requests whose tokens per second are at the 90th percentile of all windows."""
    windows, loads, first = list[tuple[int, int]](), list[float](), 0
    while first < len(families):
        end = int(np.searchsorted(sizes, sizes[first] + most, side="right")) - 1
        end = max(end, first + 1)
        if end >= len(families) and windows:
            break
        tokens = sum(_tokens(request) for family in families[first:end] for request in family)
        seconds = families[min(end, len(families) - 1)][0].arrival_s - families[first][0].arrival_s
        windows.append((first, end))
        loads.append(tokens / max(seconds, 1e-9))
        first += max(1, (end - first) // 2)
    return windows[int(np.abs(np.array(loads) - np.percentile(loads, _BUSY)).argmin())]


def _tokens(request: Request) -> int:
    return len(request.prompt_token_ids) + request.sampling.n * request.expected_tokens
