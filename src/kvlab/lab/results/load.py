"""Whether an engine kept up with the requests that arrived over time, or fell behind."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from kvlab.config import WorkloadConfig
from kvlab.core import RequestRecord
from kvlab.lab.results.log import RunLog

_FEWEST = 16  # requests: of fewer nothing can be told
_LATE = 0.15  # share of the time in which requests arrive by which waiting has to grow
_BEHIND = 0.1  # share of the arrivals of the second half that have to be missing at its end, beside chance


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """An open loop's requests per second, from the first arrival on."""

    offered_per_s: float  # refused ones too
    served_per_s: float  # completed, until the last one ended
    seconds: float  # between the first and the last arrival
    typical_s: float  # from a request's arrival to its end, median of those that came in the first quarter
    left: int  # in the engine when the last request arrived
    before: int  # and half-way
    arrivals: int  # in the second half
    sustained_per_s: float  # completed per second, without the first and the last tenth of them
    waits_s: tuple[float, float]  # for admission, medians of the first and the last quarter; 0 where not known
    refused: float  # share of what was offered; 0 of few requests

    @property
    def is_overloaded(self) -> bool:
        """Whether requests piled up to the end: more were left at the last arrival than half-way, by more than
        chance (three times the deviation of a count) and by a tenth of what came in between. A request of the first
        quarter has to have ended by half-way, as else an engine that is filling up looks the same; unless those of
        the last quarter waited longer for admission by much of the time in which requests arrived. An
        engine that completes nine tenths of what is offered is not behind; one that refuses more than a tenth is.
        """
        if self.refused > _BEHIND:
            return True
        first, last = self.waits_s
        if last - first > _LATE * self.seconds and 2 * self.arrivals >= _FEWEST:
            return True
        grown = self.left - self.before
        behind = self.sustained_per_s < (1 - _BEHIND) * self.offered_per_s
        return behind and self.is_long_enough and grown > max(_BEHIND * self.arrivals, 3 * (self.before + 1) ** 0.5)

    @property
    def is_long_enough(self) -> bool:
        """Whether it can be told: see `is_overloaded`."""
        return 2 * self.arrivals >= _FEWEST and self.typical_s <= 0.5 * self.seconds

    @property
    def overload(self) -> str | None:
        """That it is overloaded, in short; None: it is not."""
        if not self.is_overloaded:
            return None
        return f"overloaded: {self.offered_per_s:.3g} requests a second offered, {self.served_per_s:.3g} served"

    def sentence(self) -> str | None:
        """What a user should know. None: the engine kept up."""
        if (overload := self.overload) is not None:
            holds = f"About {self.sustained_per_s:.2g}" if self.sustained_per_s < self.offered_per_s else "Less"
            how = (
                f"a full queue refused {100 * self.refused:.0f} % of them"
                if self.refused > _BEHIND
                else f"{self.left} were in the engine at the last arrival, {self.before} half-way, "
                "so that latencies grow with the length of the run"
            )
            return f"{overload}; {how}. {holds} holds: kvlab tune find=rate"
        if not self.is_long_enough and self.served_per_s < 0.9 * self.offered_per_s:
            return (
                f"{self.seconds:.3g} s of arrivals are too few to tell whether {self.offered_per_s:.3g} requests a "
                f"second can be held: a request takes {self.typical_s:.3g} s. Take more (workload.num_requests of "
                f"{ceil(2 * self.typical_s * self.offered_per_s):,} at least, or a longer trace)"
            )
        return None


def open_load(workload: WorkloadConfig, log: RunLog) -> OfferedLoad | None:
    """The load of requests that wait for no other one: None in a closed loop and of conversations, too."""
    is_open = workload.concurrency is None and workload.turns == 1
    return offered_load(log.records, log.refused_s) if is_open else None


def offered_load(records: Sequence[RequestRecord], refused_s: Sequence[float] = ()) -> OfferedLoad | None:
    """The load of requests that arrived over time, with those that a full queue refused at `refused_s`; None where
    all came at once, or none ended.
    """
    firsts = [record for record in records if not record.sample]
    arrivals = sorted(record.arrival_s for record in firsts)
    ends = sorted(record.finished_s for record in firsts)
    offered = sorted([*arrivals, *refused_s])
    seconds = offered[-1] - offered[0] if offered else 0.0
    done = sum(record.completed for record in firsts)
    if seconds <= 0 or not done:
        return None
    middle, last = offered[0] + seconds / 2, offered[-1]

    def within(when: float) -> int:
        """Requests that are in the engine."""
        return bisect_right(arrivals, when) - bisect_right(ends, when)

    early = [record for record in firsts if record.arrival_s <= offered[0] + seconds / 4]
    late = [record for record in firsts if record.arrival_s >= last - seconds / 4]
    return OfferedLoad(
        offered_per_s=(len(offered) - 1) / seconds,
        served_per_s=done / (max(ends) - offered[0]),
        seconds=seconds,
        typical_s=median(record.finished_s - record.arrival_s for record in early or firsts),
        left=within(last),
        before=within(middle),
        arrivals=len(arrivals) - bisect_right(arrivals, middle),
        sustained_per_s=_sustained(ends),
        waits_s=(_wait_s(early), _wait_s(late)),
        refused=len(refused_s) / len(offered) if len(offered) >= _FEWEST else 0.0,
    )


def _sustained(ends: Sequence[float]) -> float:
    tenth = len(ends) // 10
    inner = ends[tenth : len(ends) - tenth]
    return (len(inner) - 1) / (inner[-1] - inner[0]) if inner[-1] > inner[0] else 0.0


def _wait_s(records: Sequence[RequestRecord]) -> float:
    known = [record.scheduled_s - record.arrival_s for record in records if record.scheduled_s is not None]
    return median(known) if known else 0.0
