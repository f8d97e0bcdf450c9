"""What lies between the clients and a simulated engine: a server that takes requests in and sends tokens out."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from kvlab.config import FrameworkConfig
from kvlab.core import FinishReason, Request, RequestRecord, StepRecord
from kvlab.core.step_log import StepLog
from kvlab.engine.core import EngineCore
from kvlab.engine.protocol import EngineStats, FinishCallback, OutputCallback
from kvlab.errors import RequestRefusedError
from kvlab.kv.audit import Finding
from kvlab.kv.journal import BlockJournal


class _Asked(NamedTuple):
    """A request that the engine does not have yet; `due_s` is when it comes to the front end, or to the engine."""

    due_s: float
    request: Request
    on_output: OutputCallback | None
    on_finish: FinishCallback

    def end(self, reason: FinishReason, now: float, error: str | None = None) -> None:
        """Report the end of its samples."""
        end_unserved(self.request, self.on_finish, reason, now, error)


def end_unserved(
    asked: Request, on_finish: FinishCallback, reason: FinishReason, now: float, error: str | None = None
) -> None:
    """Report the end of each sample of a request that no engine ever had."""
    prompt = len(asked.prompt_token_ids)
    for sample in range(asked.sampling.n):
        on_finish(RequestRecord(asked.request_id, sample, asked.arrival_s, prompt, (), (), reason, now, error))


def behind_front_end(engine: EngineCore, framework: FrameworkConfig) -> EngineCore | FrontEnd:
    """The engine as its clients see it; itself where the front end costs nothing."""
    costs = framework.request_us, framework.prompt_token_us, framework.output_token_us
    return FrontEnd(engine, framework) if any(costs) else engine


class FrontEnd:
    """A ServingEngine: an engine behind a front end that does one thing after the other, as it comes (FIFO).

    A request takes it `framework.request_us`, and `framework.prompt_token_us` for each token of the prompt; then
    the engine has it. A step's tokens come when the step ends and take it `framework.output_token_us` each; the
    client has them when all are sent. Times of tokens and ends of requests are the client's, and what a client does
    next counts from those; steps are the engine's, which does not wait for the front end. A request that is
    submitted after the step in which it arrived comes behind that step's tokens.

    A request that the engine refuses when the front end is through with it has failed.
    """

    def __init__(self, engine: EngineCore, framework: FrameworkConfig) -> None:
        self.core, self._framework, self.clock = engine, framework, engine.clock
        self._free_s = 0.0  # when the front end has done all that has come
        self.handed_s = 0.0  # when it was through with the request that the engine was given last
        self._arriving: list[_Asked] = []
        self._taken: deque[_Asked] = deque()
        self._ends_s: list[float] = []  # of steps with tokens, if these take the front end any time
        self._lags_s: list[float] = []  # from the end of each until its tokens are sent
        self._ended: list[tuple[RequestRecord, FinishCallback]] = []  # in the step that runs

    @property
    def journal(self) -> BlockJournal | None:
        """See Journaled."""
        return self.core.journal

    def submit(
        self, request: Request, on_output: OutputCallback | None = None, on_finish: FinishCallback | None = None
    ) -> None:
        """See ServingEngine. The arrival may lie in the future."""
        asked = _Asked(request.arrival_s, request, on_output, on_finish or (lambda record: None))
        insort(self._arriving, asked, key=attrgetter("due_s"))

    def abort(self, request_id: str) -> bool:
        """See ServingEngine."""
        for queue in (self._arriving, self._taken):
            for asked in queue:
                if asked.request.request_id == request_id:
                    queue.remove(asked)
                    asked.end(FinishReason.ABORTED, self.clock.now())
                    return True
        is_here = self.core.abort(request_id)
        self._deliver()
        return is_here

    def step(self) -> StepRecord | None:
        """See ServingEngine."""
        self._admit()
        record = self.core.step()
        self._send(StepLog() if record is None else StepLog([record]))
        self._deliver()
        return record

    def repeat(self, until_s: float) -> StepLog:
        """See Repeating. None where a request is due: its client asks again before they end if it is refused."""
        records = self.core.repeat(min(until_s, self._next_s()))
        self._send(records)
        self._deliver()
        return records

    def has_work(self) -> bool:
        """See ServingEngine."""
        return bool(self._arriving or self._taken) or self.core.has_work()

    def next_wakeup(self) -> float | None:
        """See ServingEngine."""
        of_engine = self.core.next_wakeup()
        when = min(self._next_s(), math.inf if of_engine is None else of_engine)
        return None if when == math.inf else when

    def stats(self) -> EngineStats:
        """See ServingEngine. What the front end has waits."""
        stats = self.core.stats()
        return replace(stats, waiting=stats.waiting + len(self._arriving) + len(self._taken))

    def audit(self) -> list[Finding]:
        """See Auditable."""
        return self.core.audit()

    def close(self) -> None:
        """See ServingEngine."""
        for asked in (*self._arriving, *self._taken):
            self.abort(asked.request.request_id)
        self.core.close()
        self._deliver()

    def _next_s(self) -> float:
        return min((queue[0].due_s for queue in (self._arriving, self._taken) if queue), default=math.inf)

    def _admit(self) -> None:
        """Hand the engine what the front end is through with."""
        now = self.clock.now()
        self._take(now)
        while self._taken and self._taken[0].due_s <= now:
            self._hand_over(self._taken.popleft())

    def _take(self, until_s: float) -> None:
        """Let the requests that arrive by then come to the front end."""
        framework = self._framework
        while self._arriving and self._arriving[0].due_s <= until_s:
            asked = self._arriving.pop(0)
            taking_us = framework.request_us + framework.prompt_token_us * len(asked.request.prompt_token_ids)
            self._free_s = max(self._free_s, asked.due_s) + taking_us * 1e-6
            self._taken.append(asked._replace(due_s=self._free_s))

    def _hand_over(self, asked: _Asked) -> None:
        def on_finish(record: RequestRecord) -> None:
            self._ended.append((record, asked.on_finish))

        self.handed_s = asked.due_s
        try:
            self.core.submit(asked.request, asked.on_output, on_finish)
        except RequestRefusedError as error:
            asked.end(FinishReason.FAILED, self.clock.now(), str(error))

    def _send(self, steps: StepLog) -> None:
        """Let the tokens of these steps come to the front end."""
        token_s = self._framework.output_token_us * 1e-6
        if not token_s:
            return
        got = steps.column("sampled_tokens") - steps.column("vain_tokens")
        for end_s, tokens in zip(steps.column("end_s").tolist(), got.tolist(), strict=True):
            self._take(end_s)
            if tokens > 0:  # fewer, where more were taken back
                self._free_s = max(self._free_s, end_s) + token_s * tokens
                self._ends_s.append(end_s)
                self._lags_s.append(self._free_s - end_s)

    def _deliver(self) -> None:
        """Report what ended in the engine, at the times at which the client sees it."""
        ended, self._ended = self._ended, []
        for record, on_finish in ended:
            times_s = tuple(map(self._sent_s, record.token_times_s))
            finished_s = max([record.finished_s, *times_s[-1:]])
            on_finish(replace(record, token_times_s=times_s, finished_s=finished_s))

    def _sent_s(self, token_s: float) -> float:
        """When the client has a token that the engine had at `token_s`, the end of a pass of some step."""
        step = bisect_left(self._ends_s, token_s)
        return self._ends_s[step] + self._lags_s[step] if step < len(self._lags_s) else token_s
