"""A request's life as intervals with a cause, which meet end to end from its arrival to its end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvlab.core import SequenceStatus
from kvlab.lab.results.requests import SampleKey


class Cause(StrEnum):
    """What a request's time went into."""

    FRONT_END = "the front end"
    STEP = "a step was under way"
    TOKENS = "waited: the step's tokens were planned"
    SEQUENCES = "waited: enough sequences ran"
    BLOCKS = "waited: too few blocks were free"
    POLICY = "waited: the policy admitted none"
    TIER = "waited for blocks from a tier"
    TRANSFER = "pulled K and V from another replica"
    RETURN = "preempted, waited to return"
    AGAIN = "computed again after a preemption"
    PROMPT = "its own prompt"
    OTHER_PROMPTS = "prompts of others beside it"
    OTHER_DECODES = "decoding of others beside its prompt"
    DECODE = "decoding"
    BETWEEN = "between steps"
    LOST = "lost with a replica that died"
    UNEXPLAINED = "not explained by the simulation"


_CAUSES = tuple(Cause)
_OF_STEP = 4  # intervals that a step may add to a timeline, and the one before


class Interval(NamedTuple):
    """From `start_s` to `end_s`, on the engine's clock."""

    start_s: float
    end_s: float
    cause: Cause


class Timeline:
    """Intervals that meet end to end, which many sequences have in common: of those that wait, or that decode. So a
    step takes no time for each of them.
    """

    def __init__(self) -> None:
        self._intervals: list[Interval] = []
        self._columns: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        return len(self._intervals)

    def add(self, cause: Cause, start_s: float, end_s: float) -> None:
        """Append an interval, or lengthen the last where it has the same cause."""
        last = self._intervals[-1] if self._intervals else None
        if last is not None and last.cause is cause:
            self._intervals[-1] = last._replace(end_s=end_s)
        elif end_s > start_s:
            self._intervals.append(Interval(start_s, end_s, cause))
        self._columns = None

    def between(self, first: int, start_s: float, end_s: float) -> Iterator[Interval]:
        """What is in a time, which begins in the interval number `first`."""
        for number in range(first, len(self._intervals)):
            interval = self._intervals[number]
            start, end = max(interval.start_s, start_s), min(interval.end_s, end_s)
            if start >= end_s:
                return
            if end > start:
                yield Interval(start, end, interval.cause)

    def seconds(self, first: int, start_s: float, end_s: float) -> dict[Cause, float]:
        """Seconds by cause within a time, which begins in the interval number `first`."""
        if self._columns is None:
            starts, ends, causes = zip(*self._intervals, strict=True)
            self._columns = np.array(starts), np.array(ends), np.array([_CAUSES.index(cause) for cause in causes])
        starts_s, ends_s, numbers = self._columns
        last = int(np.searchsorted(starts_s, end_s))
        lengths = np.minimum(ends_s[first:last], end_s) - np.maximum(starts_s[first:last], start_s)
        sums = np.bincount(numbers[first:last], np.maximum(lengths, 0.0), len(_CAUSES))
        return {_CAUSES[number]: float(sums[number]) for number in np.flatnonzero(sums)}


class _Part(NamedTuple):
    """What a life has of a timeline."""

    timeline: Timeline
    first: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class Life:
    """What a sequence's time went into so far, and of its waits for blocks who had them: block-seconds."""

    key: SampleKey
    parts: list[Interval | _Part]
    until_s: float  # the end of the last of them
    holders: Counter[SampleKey] = field(default_factory=Counter)
    before: int = 0  # in the queue when it came
    at: SequenceStatus = SequenceStatus.WAITING  # behind the last step in which it was looked at
    _joined: tuple[Timeline, int] | None = None

    def add(self, cause: Cause, end_s: float) -> None:
        """Append the time from `until_s` to `end_s`, or lengthen the last interval where it has the same cause."""
        if end_s <= self.until_s:
            return
        last = self.parts[-1] if self.parts else None
        if isinstance(last, Interval) and last.cause is cause:
            self.parts[-1] = last._replace(end_s=end_s)
        else:
            self.parts.append(Interval(self.until_s, end_s, cause))
        self.until_s = end_s

    def join(self, timeline: Timeline) -> None:
        """Share the intervals of a timeline from `until_s` on, which is in the last step or behind it."""
        self._joined = timeline, max(len(timeline) - _OF_STEP, 0)

    def leave(self, end_s: float) -> None:
        """Leave the timeline at `end_s`."""
        if self._joined is not None and end_s > self.until_s:
            self.parts.append(_Part(*self._joined, self.until_s, end_s))
            self.until_s = end_s
        self._joined = None

    def cut(self, end_s: float) -> None:
        """Drop what is noted behind `end_s`."""
        while self.parts and self.until_s > end_s:
            last = self.parts.pop()
            self.until_s = last.start_s
            if last.start_s < end_s:
                self.parts.append(last._replace(end_s=end_s))
                self.until_s = end_s

    def rename(self, cause: Cause, other: Cause) -> None:
        """Give the intervals of a cause another."""
        self.parts = [
            part._replace(cause=other) if isinstance(part, Interval) and part.cause is cause else part
            for part in self.parts
        ]

    def detail(self, cause: Cause, own: Life) -> None:
        """Replace the intervals of a cause by what `own`, another life of the request, has in that time."""
        parts, self.parts = self.parts, []
        for part in parts:
            self.until_s = part.start_s
            if isinstance(part, Interval) and part.cause is cause:
                for other in own.parts:
                    self.add(cause, min(other.start_s, part.end_s))
                    end_s = min(other.end_s, part.end_s)
                    if end_s > self.until_s:
                        self.parts.append(other._replace(start_s=self.until_s, end_s=end_s))
                        self.until_s = end_s
                self.add(cause, part.end_s)
            else:
                self.parts.append(part)
                self.until_s = part.end_s

    def follow(self, own: Life) -> None:
        """Append what `own`, another life of the request, has behind `until_s`."""
        for part in own.parts:
            if part.end_s > self.until_s:
                self.parts.append(part._replace(start_s=max(part.start_s, self.until_s)))
                self.until_s = part.end_s
        self.holders.update(own.holders)
        self.before = self.before or own.before

    @property
    def intervals(self) -> list[Interval]:
        """All of it."""
        intervals: list[Interval] = []
        for part in self.parts:
            intervals += [part] if isinstance(part, Interval) else part.timeline.between(*part[1:])
        return intervals

    def terms_ms(self, until_s: float = math.inf) -> dict[Cause, float]:
        """Milliseconds by cause, the longest first; up to a time, where one is given."""
        by_cause: dict[Cause, float] = {}
        for part in self.parts:
            end_s = min(part.end_s, until_s)
            if end_s <= part.start_s:
                break
            if isinstance(part, Interval):
                terms = {part.cause: end_s - part.start_s}
            else:
                terms = part.timeline.seconds(part.first, part.start_s, end_s)
            for cause, seconds in terms.items():
                by_cause[cause] = by_cause.get(cause, 0.0) + 1000 * seconds
        return dict(sorted(by_cause.items(), key=lambda term: -term[1]))
