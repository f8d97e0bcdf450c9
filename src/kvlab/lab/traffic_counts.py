"""Counts of the requests of a traffic that is imported, taken as they go by."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from kvlab.errors import WorkloadError, shown
from kvlab.workloads.importers.base import Importer
from kvlab.workloads.trace_format import TracedRequest


@dataclass(slots=True)
class Counts:
    """What requests say, over all of them."""

    drop: Collection[str] = ()  # `times`, `outputs`: requests without are left out; the importer does `prompts`
    drawn: int = 0  # tokens of the longest output that a run draws where none is known
    requests: int = 0
    prompt: int = 0
    output: int = 0
    longest: int = 0  # tokens of a request, prompt and output, drawn ones at their longest
    timed: int = 0
    answered: int = 0
    dropped: int = 0
    beyond: int = 0  # requests of which more prompt tokens were cached than they have
    nothing: int = 0  # requests of 0 tokens, which are left out
    first_nothing: str = ""  # where the first of them is
    without: dict[str, str] = field(default_factory=dict)  # where the first without `times`, `outputs` is
    first_s: float = 0.0
    last_s: float = 0.0

    def asking(self, importer: Importer) -> Iterator[TracedRequest]:
        """The requests that ask for something: with a prompt, and with an output unless that is not known."""
        for number, request in enumerate(importer.requests(), 1):
            place = importer.place
            where = f"request {number}" if place is None else f"in {place.part} {place.line}"
            lacks = [("times", request.arrival_s), ("outputs", request.output_tokens)]
            missing = [name for name, value in lacks if value is None]
            if not request.prompt_tokens or request.output_tokens == 0:
                what = f"0 {'output' if request.prompt_tokens else 'prompt'} tokens"
                self.first_nothing = self.first_nothing or f"{where}, with {what}"
                self.nothing += 1
            elif not set(missing).isdisjoint(self.drop):
                self.dropped += 1
            else:
                for name in missing:
                    self.without.setdefault(name, where)
                yield request

    def count(self, requests: Iterable[TracedRequest], path: str) -> Iterator[TracedRequest]:
        """The requests, with arrivals after the first. Raises WorkloadError for times that go backwards."""
        for request in requests:
            arrival = request.arrival_s
            if arrival is not None:
                if not self.timed:
                    self.first_s = self.last_s = arrival
                if arrival < self.last_s:
                    number = self.requests + self.nothing + 1
                    text = f"request {number} arrives {self.last_s - arrival:g} s before the one before it"
                    raise WorkloadError(f"{shown(path)}: {text}; sort=true sorts them")
                self.last_s = arrival
                self.timed += 1
                request.arrival_s = round(arrival - self.first_s, 6)
            self.requests += 1
            self.prompt += request.prompt_tokens
            self.output += request.output_tokens or 0
            output = request.output_tokens
            if output is None:
                output = min(self.drawn, request.max_tokens or self.drawn)
            self.longest = max(self.longest, request.prompt_tokens + output)
            self.answered += request.output_tokens is not None
            self.beyond += (request.cached_tokens or 0) > request.prompt_tokens
            yield request

    def all_or_none(self, requests: Iterable[TracedRequest], path: str) -> Iterator[TracedRequest]:
        """The requests. Raises WorkloadError behind the last where some have what others have not."""
        yield from requests
        for name, what, some in (
            ("times", "an arrival time", self.timed),
            ("outputs", "an output length", self.answered),
        ):
            if 0 < some < self.requests:
                text = f"{some} of {self.requests} requests have {what}, the first without is {self.without[name]}"
                dropped = ",".join([*self.drop, name])
                advice = f"expected all or none; drop={dropped} leaves those without out"
                raise WorkloadError(f"{shown(path)}: {text}; {advice}")

    @property
    def left_out(self) -> str:
        """What is said of requests that ask for nothing."""
        return f"left out, since they ask for nothing: {self.nothing:,}, the first {self.first_nothing}"

    @property
    def doubt(self) -> str:
        """What is said of requests whose prompts cannot have what was cached of them."""
        text = f"cached_tokens is more than prompt_tokens in {self.beyond:,} of {self.requests:,} requests"
        return f"{text}: one of the two counts something else"

    @property
    def text(self) -> str:
        """In a line."""
        said = f"{self.requests:,} requests, {self.prompt:,} prompt tokens"
        said += f", {self.output:,} output tokens" if self.answered else ""
        span = self.last_s - self.first_s
        if self.timed and span > 0:
            said += f", in {_duration(span)} ({self.requests / span:.3g} a second)"
        return said


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} minutes" if seconds < 7200 else f"{seconds / 3600:.3g} hours"
