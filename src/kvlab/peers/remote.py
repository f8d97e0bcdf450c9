"""What all engines outside this process have in common: requests on their way, and what came back of them."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvlab.core import FinishReason, Request, RequestRecord, StepOutput, StepRecord
from kvlab.engine.protocol import EngineReport, EngineSeries, EngineStats, FinishCallback, OutputCallback
from kvlab.errors import PeerError
from kvlab.peers.loop import LoopClock

MOST_LAG_MS = 5.0  # between a request's arrival and its sending, p99: beyond, the client sets the pace
#: What none of them tells of a request: when it was admitted, preempted and resumed.
UNREPORTED = frozenset({"scheduled_s", "queue_ms", "preemptions", "preempted_s", "resumed_s", "recomputed_tokens"})


@dataclass(slots=True, eq=False)
class Sample:
    """What came of one sample of a request so far."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    finished_s: float = 0.0
    error: str | None = None

    def end(self, reason: FinishReason, when: float, error: str | None = None) -> None:
        """It has ended; what comes later changes nothing."""
        if self.reason is None:
            self.reason, self.finished_s, self.error = reason, when, error


@dataclass(slots=True, eq=False)
class Exchange:
    """A request on its way, and what came back of it."""

    request: Request
    on_output: OutputCallback | None
    on_finish: FinishCallback | None
    samples: list[Sample]
    cached_tokens: int | None = None  # of the prompt, where the engine tells
    scheduled_s: float | None = None  # first admitted, where it tells


class RemoteEngine(ABC):
    """A ServingEngine outside this process, which `clock.loop` talks to; `step` hands on what has come."""

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: requests arrive at times of their own, not when others have ended."""
        self._is_open = is_open
        self.clock = LoopClock()
        self._open: dict[str, Exchange] = {}
        self._news: deque[Callable[[], None]] = deque()
        self._failure: PeerError | None = None
        self._lags_ms: list[float] = []  # of requests that arrived one by one
        self._tells_cached = False
        self._ended = self._short = 0  # requests that have ended; those of a forced length that ended before it

    def submit(
        self, request: Request, on_output: OutputCallback | None = None, on_finish: FinishCallback | None = None
    ) -> None:
        """See ServingEngine."""
        self._check(request)
        exchange = Exchange(request, on_output, on_finish, [Sample() for _ in range(request.sampling.n)])
        self._open[request.request_id] = exchange
        self._send(exchange)

    def abort(self, request_id: str) -> bool:
        """See ServingEngine."""
        exchange = self._open.get(request_id)
        if exchange is None:
            return False
        self._cancel(exchange)
        now = self.clock.now()
        for sample in exchange.samples:
            sample.end(FinishReason.ABORTED, now)
        self._deliver(exchange)
        return True

    def step(self) -> StepRecord | None:
        """Hand on what has come. None: the steps are not known. Raises PeerError where the engine is gone."""
        while self._news:
            self._news.popleft()()
        if self._failure is not None:
            raise self._failure
        return None

    def has_work(self) -> bool:
        """Whether an answer is not there yet."""
        return bool(self._open)

    def next_wakeup(self) -> float | None:
        """When the clock says so: it wakes who waits as soon as something comes."""
        return float("inf") if self._open else None

    def stats(self) -> EngineStats:
        """What is known here: the requests on their way."""
        return EngineStats(running=len(self._open), waiting=0)

    def report(self) -> EngineReport:
        """What the client saw; kinds of engines add what they know."""
        metrics: dict[str, float] = {}
        notes: list[str] = []
        invalid = None
        if self._lags_ms:
            p50, p99 = np.percentile(self._lags_ms, [50, 99]).tolist()
            metrics = {"client/send_lag_ms_p50": p50, "client/send_lag_ms_p99": p99}
            if p99 > MOST_LAG_MS:
                invalid = (
                    f"requests were sent {p99:.1f} ms late (p99; at most {MOST_LAG_MS:g}): the client could not "
                    "keep up, so that the figures are not those of the arrivals asked for; lower workload.rate"
                )
        if self._short:
            notes.append(
                f"{self._short} of {self._ended} answers are shorter than was asked for: the engine does not obey "
                "ignore_eos, and throughput is not comparable"
            )
        unreported = UNREPORTED if self._tells_cached else UNREPORTED | {"cached_tokens"}
        return EngineReport(
            metrics=metrics, series=self._series(), unreported=unreported, notes=notes, invalid=invalid
        )

    def close(self) -> None:
        """End every connection and process. May be called more than once."""
        self._open.clear()
        self._news.clear()
        self.clock.close(self._shut)

    @abstractmethod
    def _check(self, request: Request) -> None:
        """Raise RequestRefusedError for a request that the engine cannot be asked."""

    @abstractmethod
    def _send(self, exchange: Exchange) -> None:
        """Begin to send a request."""

    @abstractmethod
    def _cancel(self, exchange: Exchange) -> None:
        """Nobody waits for a request any more."""

    @abstractmethod
    async def _shut(self) -> None:
        """End what the engine holds; its tasks are cancelled."""

    def _series(self) -> EngineSeries:
        return EngineSeries()

    def _was_sent(self, request: Request, when: float) -> None:
        """Only a request with a time of its own can be late: not one of a burst at 0, which is written as fast as
        it can be, nor one that comes when another has ended.
        """
        if self._is_open and request.arrival_s > 0 and request.follows is None:
            self._lags_ms.append(1000 * max(0.0, when - request.arrival_s))

    def _add(self, exchange: Exchange, index: int, token_ids: Sequence[int], when: float, text: str = "") -> None:
        """Tokens of a sample have come."""
        sample = exchange.samples[index]
        sample.token_ids += token_ids
        sample.times_s += [when] * len(token_ids)
        sample.text += text
        if exchange.on_output is not None:
            for token in token_ids:
                self._news.append(partial(self._emit, exchange, StepOutput(self._id(exchange), token, index=index)))
            self.clock.wake()

    def _finish(self, exchange: Exchange) -> None:
        """All samples of a request have ended."""
        self._news.append(partial(self._deliver, exchange))
        self.clock.wake()

    def _fail(self, exchange: Exchange, error: str) -> None:
        """A request can have no more."""
        now = self.clock.now()
        for sample in exchange.samples:
            sample.end(FinishReason.FAILED, now, error)
        self._finish(exchange)

    def _break(self, error: PeerError) -> None:
        """The engine is gone: the next step says so."""
        self._failure = self._failure or error
        self.clock.wake()

    def _emit(self, exchange: Exchange, output: StepOutput) -> None:
        sample = exchange.samples[output.index]
        if exchange.on_output is None or self._id(exchange) not in self._open or sample.error is not None:
            return
        try:
            exchange.on_output(output)
        except Exception as error:  # fails its own sample alone
            sample.reason = None
            sample.end(FinishReason.FAILED, self.clock.now(), f"on_output raised {type(error).__name__}: {error}")
            if all(other.reason is not None for other in exchange.samples):
                self._cancel(exchange)
                self._deliver(exchange)

    def _deliver(self, exchange: Exchange) -> None:
        """Report the records of a request that has ended, once."""
        if self._open.pop(self._id(exchange), None) is None:
            return
        self._ended += 1
        self._tells_cached |= exchange.cached_tokens is not None
        sampling = exchange.request.sampling
        for index, sample in enumerate(exchange.samples):
            reason = sample.reason or FinishReason.ABORTED
            completed = reason in (FinishReason.STOP, FinishReason.LENGTH)
            self._short += (
                completed and sampling.ignore_eos and len(sample.token_ids) < exchange.request.expected_tokens
            )
            if exchange.on_output is not None and sample.error is None:
                with suppress(Exception):
                    exchange.on_output(StepOutput(self._id(exchange), None, reason, index=index))
            if exchange.on_finish is not None:
                exchange.on_finish(self._record(exchange, index, sample, reason))

    def _record(self, exchange: Exchange, index: int, sample: Sample, reason: FinishReason) -> RequestRecord:
        request = exchange.request
        return RequestRecord(
            request_id=request.request_id,
            sample=index,
            arrival_s=request.arrival_s,
            prompt_tokens=len(request.prompt_token_ids),
            output_token_ids=tuple(sample.token_ids),
            token_times_s=tuple(sample.times_s),
            finish_reason=reason,
            finished_s=sample.finished_s,
            error=sample.error,
            text=sample.text,
            prompt=request.prompt_text,
            cached_tokens=exchange.cached_tokens or 0 if index == 0 else 0,
            scheduled_s=exchange.scheduled_s,
        )

    @staticmethod
    def _id(exchange: Exchange) -> str:
        return exchange.request.request_id
