"""The engine as a library: what `kvlab.Engine` is."""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from kvlab.config import EngineConfig
from kvlab.core import Request, StepOutput, StepRecord
from kvlab.engine.build import build_engine, plan_engine
from kvlab.engine.clock import Clock
from kvlab.engine.core import EngineCore
from kvlab.engine.garbage import gc_frozen
from kvlab.engine.protocol import WHY_IDLE, EngineStats, FinishCallback, OutputCallback
from kvlab.engine.text import Detokenizer
from kvlab.errors import EngineStoppedError, KvlabError
from kvlab.kv.audit import Finding

_MAX_WAIT_S = 0.005  # while nothing can run, so that an arrival is seen soon
_MOST_IDLE_S = 20.0
_log = logging.getLogger(__name__)

T = TypeVar("T")
Emitted = StepOutput | EngineStoppedError


class Engine:
    """Serves requests to loops, `for output in engine.generate(...)`, and to coroutines, `async for output in
    engine.stream(...)`, from any number of threads at once. Several engines live in one process undisturbed.

    One thread steps at a time, for all requests: the caller of `generate` or `step`, or, while there are streams, a
    thread of the engine's own, which ends when there is nothing left to do. What other threads ask of the engine
    meanwhile is done between two steps. `on_step` is given each step's record by the thread that steps. While
    requests are served, Python's garbage collector runs rarely, in the whole process; see `kvlab.engine.garbage`.
    `core` is the engine that steps; its pool and statistics are there.
    """

    def __init__(self, core: EngineCore, *, on_step: Callable[[StepRecord], None] | None = None) -> None:
        self.core = core
        self._on_step = on_step
        self._stepping = threading.RLock()  # held by the thread that steps; it guards the core
        self._holder = 0  # the thread that holds it
        self._inbox: deque[Callable[[], None]] = deque()  # what is to be done between two steps
        self._worker_lock = threading.Lock()  # guards the worker; taken after `_stepping`, never before
        self._worker: threading.Thread | None = None
        self._calls: set[Call] = set()
        self._broken: Exception | None = None

    @classmethod
    def from_config(cls, config: EngineConfig, *, detokenize: Detokenizer | None = None) -> Engine:
        """The engine that a run of the laboratory with this configuration has. With a `detokenize` function,
        outputs carry text and requests may have stop strings.

        Raises a KvlabError for settings that cannot work, naming them.
        """
        return cls(build_engine(plan_engine(config), detokenize=detokenize))

    def generate(self, requests: Request | Iterable[Request]) -> Iterator[StepOutput]:
        """Serve requests, and give each token and each end as it comes. The calling thread steps; leaving the loop
        early aborts what is not done.

        A request that fails ends with an output that says why. Raises RequestRefusedError, at the first output,
        if one can never be served: the others are then aborted, those of other callers go on; EngineStoppedError.
        """
        outputs: queue.SimpleQueue[Emitted] = queue.SimpleQueue()
        asked = [requests] if isinstance(requests, Request) else requests
        calls = [Call(self, request, outputs.put) for request in asked]
        with gc_frozen():
            try:
                for call in calls:
                    self._between_steps(call.open).result()
                left = sum(call.request.sampling.n for call in calls)
                while left:
                    has_worker = self._worker is not None  # which steps, and lets time pass
                    try:
                        output = outputs.get(block=has_worker, timeout=_MAX_WAIT_S)
                    except queue.Empty:
                        self._check()
                        if not has_worker and self.step() is None:
                            self._wait()
                        continue
                    if isinstance(output, EngineStoppedError):
                        raise output
                    left -= output.finish_reason is not None
                    yield output
            finally:
                for call in calls:
                    self._between_steps(call.close).result()
                if self._broken is None and self._worker is None and self.core.has_work():
                    self.step()  # gives the memory back

    async def stream(self, request: Request) -> AsyncGenerator[StepOutput, None]:
        """Serve one request, and give each token and each end as it comes. Closing the iterator, or cancelling the
        task that waits for it, aborts the request.

        A slow caller delays no other: its outputs are queued. Raises RequestRefusedError at the first output;
        EngineStoppedError.
        """
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[Emitted] = asyncio.Queue()
        call = Call(self, request, lambda output: loop.call_soon_threadsafe(outputs.put_nowait, output))
        try:
            await asyncio.wrap_future(call.start())
            left = request.sampling.n
            while left:
                output = await outputs.get()
                if isinstance(output, EngineStoppedError):
                    raise output
                left -= output.finish_reason is not None
                yield output
        finally:
            call.leave()

    def call(
        self,
        request: Request,
        emit: Callable[[Emitted], object],
        on_finish: FinishCallback | None = None,
        arrival_s: float | None = None,
    ) -> Call:
        """One request for callers that are neither loops nor coroutines; `Call.start` begins it. It arrives now, or
        has arrived at `arrival_s` on the engine's clock.

        `emit` is given each output, and an EngineStoppedError where there will be no more; `on_finish` is given
        each sample's record, behind its last output. Both are called by the thread that steps.
        """
        return Call(self, request, emit, on_finish, arrival_s)

    @property
    def clock(self) -> Clock:
        """See ServingEngine."""
        return self.core.clock

    def submit(
        self, request: Request, on_output: OutputCallback | None = None, on_finish: FinishCallback | None = None
    ) -> None:
        """Queue a request; `step` serves it. See ServingEngine. It arrives now, whatever its `arrival_s`."""
        arrived = replace(request, arrival_s=self.core.clock.now())
        self._between_steps(lambda: self._submit(arrived, on_output, on_finish)).result()

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is; its memory is free in the next step. False if it is not here."""
        return self._between_steps(lambda: self.core.abort(request_id)).result()

    def has_work(self) -> bool:
        """Whether a sequence waits, runs, or still holds memory after its end."""
        return self.core.has_work()

    def step(self) -> StepRecord | None:
        """Run one step for all requests. None if nothing could run. Raises EngineStoppedError."""
        with self._turn():
            self._run_inbox()
            self._check()
            try:
                record = self.core.step()
                if record is not None and self._on_step is not None:
                    self._on_step(record)
            except Exception as error:
                self._broken = error
                for call in self._calls:
                    with suppress(RuntimeError):  # its event loop is closed
                        call.emit(self._stopped(error))
                raise self._stopped(error) from error
        self._run_inbox_if_free()
        return record

    def next_wakeup(self) -> float | None:
        """See ServingEngine."""
        return self.core.next_wakeup()

    @property
    def broken(self) -> bool:
        """Whether a step failed; the engine serves no more then."""
        return self._broken is not None

    def stats(self) -> EngineStats:
        """See ServingEngine."""
        return self.core.stats()

    def audit(self) -> list[Finding]:
        """See Auditable. From any thread; between two steps where another thread steps."""
        return self._between_steps(self.core.audit).result()

    def inspect(self, look: Callable[[EngineCore], T]) -> Future[T]:
        """What `look` finds in the engine that steps. From any thread; between two steps, which it delays."""
        return self._between_steps(lambda: look(self.core))

    def close(self) -> None:
        """See ServingEngine. Requests that have not ended are aborted; their callers get that as output."""
        self._between_steps(self.core.close).result()

    def _submit(
        self, request: Request, on_output: OutputCallback | None, on_finish: FinishCallback | None = None
    ) -> None:
        self._check()
        self.core.submit(request, on_output, on_finish)

    def _between_steps(self, action: Callable[[], T]) -> Future[T]:
        """Run an action now if no thread steps, else let the thread that does run it after its step."""
        future: Future[T] = Future()
        self._inbox.append(partial(_run, future, action))
        self._run_inbox_if_free()
        return future

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock to step, and say who does."""
        with self._stepping:
            before, self._holder = self._holder, threading.get_ident()
            try:
                yield
            finally:
                self._holder = before

    def _run_inbox_if_free(self) -> None:
        """Run the inbox's actions unless another thread steps, which does so between steps. A worker does all of
        them: callers that ask in loops would keep it from its next step.
        """
        if self._holder == threading.get_ident():  # a callback asks
            self._run_inbox()
            return
        while self._inbox and self._worker is None and self._stepping.acquire(blocking=False):
            try:
                with self._turn():
                    self._run_inbox()
            finally:
                self._stepping.release()

    def _run_inbox(self) -> None:
        """Run the actions that are there now. Those that come meanwhile wait for a step: they may never end."""
        for _ in range(len(self._inbox)):
            if self._inbox:  # an action may have run others
                self._inbox.popleft()()

    def _wait(self) -> bool:
        """Let time pass; returns whether the core says when it goes on."""
        clock, wakeup = self.core.clock, self.core.next_wakeup()
        clock.rest()
        now_s = clock.now()
        latest = now_s + _MAX_WAIT_S
        clock.wait_until(latest if wakeup is None else min(wakeup, latest))
        return wakeup is not None and now_s < wakeup < math.inf

    def _start_worker(self) -> None:
        with self._worker_lock:
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="kvlab-engine", daemon=True)
                self._worker.start()

    @gc_frozen()
    def _work(self) -> None:
        busy_s: float | None = self.core.clock.now()  # of the last step, or wait for a known time; None: said
        while True:
            try:
                record = self.step()
            except EngineStoppedError:  # its callers have got the error
                record = None
            # With both locks held no request is missed: one that comes later finds no worker and starts another.
            with self._turn(), self._worker_lock:
                if self._broken is not None or not (self._inbox or self.core.has_work()):
                    self._worker = None
                    self.core.clock.rest()
                    break
            if record is not None or self._wait():
                busy_s = self.core.clock.now()
                continue
            if busy_s is not None and self.core.clock.now() - busy_s > _MOST_IDLE_S:
                busy_s, stats = None, self.stats()
                text = "steps have done nothing for %g s, and %d requests wait and %d run; %s"
                _log.warning(text, _MOST_IDLE_S, stats.waiting, stats.running, WHY_IDLE)
        self._run_inbox_if_free()

    def _check(self) -> None:
        if self._broken is not None:
            raise self._stopped(self._broken)

    @staticmethod
    def _stopped(error: Exception) -> EngineStoppedError:
        reason = "" if isinstance(error, EngineStoppedError) else f"a step raised {type(error).__name__}: "
        return EngineStoppedError(f"the engine stopped: {reason}{error}")


def _run(future: Future[T], action: Callable[[], T]) -> None:
    """Give the future what an action returns or raises."""
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(action())
    except Exception as error:
        # The frames of a traceback hold the future, and that the error: a cycle. A refusal's sentence says it all.
        future.set_exception(error.with_traceback(None) if isinstance(error, KvlabError) else error)


class Call:
    """One request of a caller that may leave before its end. It arrives when the call is made, if not before: the
    step that may be running meanwhile is time that it waits.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        emit: Callable[[Emitted], object],
        on_finish: FinishCallback | None = None,
        arrival_s: float | None = None,
    ) -> None:
        self.request = replace(request, arrival_s=engine.clock.now() if arrival_s is None else arrival_s)
        self.emit = emit
        self._engine = engine
        self._on_finish = on_finish
        self._left = 0  # samples that have not ended

    def start(self) -> Future[None]:
        """Queue the request, which a thread of the engine then serves. The future raises RequestRefusedError or
        EngineStoppedError.
        """
        accepted = self._engine._between_steps(self.open)
        self._engine._start_worker()
        return accepted

    def leave(self) -> None:
        """The caller has left: between two steps, what is not done is aborted and its memory free."""
        self._engine._between_steps(self.close)
        self._engine._start_worker()

    def open(self) -> None:
        """Between steps: queue the request. Raises RequestRefusedError."""
        self._engine._submit(self.request, self._on_output, self._on_finish)
        self._left = self.request.sampling.n
        self._engine._calls.add(self)

    def close(self) -> None:
        """Between steps: abort what is not done."""
        self._engine._calls.discard(self)
        if self._left:
            self._engine.core.abort(self.request.request_id)

    def _on_output(self, output: StepOutput) -> None:
        self._left -= output.finish_reason is not None
        self.emit(output)
