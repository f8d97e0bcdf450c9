"""A call's outputs on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from contextlib import suppress

import pytest

from kvlab.engine.clock import WallClock
from kvlab.engine.service import Engine
from kvlab.server.calls import ClientCall, Mailbox
from kvlab.server.errors import ApiError
from tests.support.engines import make_engine, request
from tests.support.serving import wait_until


def test_a_reader_that_comes_too_late_is_told_so_and_not_that_all_has_ended() -> None:
    engine = Engine(make_engine(clock=WallClock()))

    async def main() -> None:
        call = ClientCall(
            engine,
            Mailbox(asyncio.get_running_loop()),
            [request("a", 4, 40, n=2)],
            most_waiting=3,
            on_finish=lambda record: None,
            arrival_s=0.0,
        )
        await call.start()
        deadline = time.monotonic() + 30
        while engine.has_work():  # more outputs than may wait: the call is aborted
            assert time.monotonic() < deadline
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="the client reads too slowly: 4 outputs were waiting for it"):
            _ = [event async for event in call.events()]

    asyncio.run(main())


def test_a_call_that_was_left_is_free_without_the_garbage_collector() -> None:
    engine = Engine(make_engine(clock=WallClock(), max_batch_size=1, max_waiting_requests=1))
    known: list[weakref.ref[ClientCall]] = []

    async def one(mailbox: Mailbox, name: str) -> None:
        call = ClientCall(
            engine,
            mailbox,
            [request(name, 4, 30)],
            most_waiting=100,
            on_finish=lambda record: None,
            arrival_s=0.0,
        )
        known.append(weakref.ref(call))
        with suppress(ApiError):  # the queue is full
            await call.start()
            async for _ in call.events():
                pass
        call.leave()

    async def main() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        await asyncio.gather(*(one(mailbox, f"r{number}") for number in range(5)))
        while engine.has_work():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)

    gc.disable()
    try:
        asyncio.run(main())
        wait_until(lambda: not any(each() for each in known))
    finally:
        gc.enable()


def test_a_call_that_was_refused_at_once_is_free_without_the_garbage_collector() -> None:
    engine, known = Engine(make_engine(clock=WallClock())), list[weakref.ref[ClientCall]]()

    async def main() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())
        too_long = [request("a", 4, 10**6)]
        call = ClientCall(engine, mailbox, too_long, most_waiting=9, on_finish=lambda record: None, arrival_s=0.0)
        known.append(weakref.ref(call))
        with pytest.raises(ApiError, match="max_tokens"):
            await call.start()

    gc.disable()
    try:
        asyncio.run(main())
        wait_until(lambda: known[0]() is None)
    finally:
        gc.enable()
