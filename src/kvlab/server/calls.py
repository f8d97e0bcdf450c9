"""A client's call to the engine: outputs come from the thread that steps, and are read in the event loop."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvlab.core import Request, RequestRecord, StepOutput
from kvlab.engine.protocol import FinishCallback
from kvlab.engine.service import Emitted, Engine
from kvlab.errors import EngineStoppedError, KvlabError
from kvlab.server.errors import ApiError, api_error

_WAITING_STEPS = 2  # whose outputs may wait, of a call with so many samples that one step fills the buffer


class Event(NamedTuple):
    """An output of one of a call's requests; with the sample's last output its record."""

    request: int  # which of the call's requests
    output: StepOutput
    record: RequestRecord | None = None


class Mailbox:
    """Hands what the engine's thread posts to the event loop: what a step posts wakes the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[Callable[[Event | KvlabError], None], Event | KvlabError]] = deque()
        self._woken = False

    def post(self, deliver: Callable[[Event | KvlabError], None], item: Event | KvlabError) -> None:
        """From any thread: have `deliver(item)` called in the loop."""
        self._posted.append((deliver, item))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False  # before anything is taken, so that what is posted meanwhile wakes the loop again
        while self._posted:
            deliver, item = self._posted.popleft()
            deliver(item)


class ClientCall:
    """The requests of one HTTP call. `most_waiting`: outputs that may wait for a slow client, which is then cut;
    of a call with many samples those of several steps. `on_finish` is given each sample's record by the thread that
    steps. `arrival_s`: on the engine's clock.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        requests: Sequence[Request],
        *,
        most_waiting: int,
        on_finish: FinishCallback,
        arrival_s: float,
    ) -> None:
        self.requests = requests
        self._mailbox = mailbox
        samples = sum(request.sampling.n for request in requests)
        self._most_waiting = max(most_waiting, _WAITING_STEPS * samples)
        self._on_finish = on_finish
        self._waiting: deque[Event] = deque()
        self._error: Callable[[], ApiError] | None = None  # made when it is raised: it would hold what holds it
        self._arrived = asyncio.Event()
        self._last: dict[tuple[str, int], StepOutput] = {}  # outputs that end a sample, until its record comes
        self._calls = [
            engine.call(request, self._emitter(number), self._finisher(number), arrival_s)
            for number, request in enumerate(requests)
        ]

    async def start(self) -> None:
        """Queue the requests: all of them, or none. Raises ApiError."""
        try:
            for call in self._calls:
                await asyncio.wrap_future(call.start())
        except KvlabError as error:
            self.leave()
            raise api_error(error) from error
        except asyncio.CancelledError:
            self.leave()
            raise

    async def events(self) -> AsyncIterator[list[Event]]:
        """The outputs as they come, up to the end of the last sample: all that wait at once, one at least. Raises
        ApiError.
        """
        left = sum(request.sampling.n for request in self.requests)
        while left:
            while not self._waiting:
                if self._error is not None:
                    raise self._error()
                self._arrived.clear()
                await self._arrived.wait()
            events = list(self._waiting)
            self._waiting.clear()
            for number, event in enumerate(events):
                left -= event.record is not None
                if event.record is not None and event.output.error is not None:
                    if number:
                        yield events[:number]
                    raise ApiError(503, f"the request failed: {event.output.error}")  # it may be tried again
            yield events

    def leave(self) -> None:
        """Nobody reads any more: what is not done is aborted before the engine's next step."""
        # They hold this one: a cycle that would wait for the garbage collector.
        calls, self._calls = self._calls, []
        for call in calls:
            call.leave()

    def _emitter(self, number: int) -> Callable[[Emitted], None]:
        def emit(output: Emitted) -> None:
            if isinstance(output, EngineStoppedError):
                self._mailbox.post(self._deliver, output)
            elif output.finish_reason is not None:
                self._last[output.request_id, output.index] = output
            else:
                self._mailbox.post(self._deliver, Event(number, output))

        return emit

    def _finisher(self, number: int) -> Callable[[RequestRecord], None]:
        def finish(record: RequestRecord) -> None:
            self._on_finish(record)
            self._mailbox.post(self._deliver, Event(number, self._last.pop(record.key), record))

        return finish

    def _deliver(self, item: Event | KvlabError) -> None:
        if self._error is not None:  # what comes now are the ends of what was aborted
            return
        if isinstance(item, KvlabError):
            self._error = partial(api_error, item)
        elif len(self._waiting) < self._most_waiting:
            self._waiting.append(item)
        else:
            text = f"the client reads too slowly: {self._most_waiting} outputs were waiting for it"
            self._error = partial(ApiError, 408, text)
            self._waiting.clear()
            self.leave()
        self._arrived.set()
