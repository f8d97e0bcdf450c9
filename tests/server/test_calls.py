"""A call's outputs on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvlab.engine.clock import WallClock
from kvlab.engine.service import Engine
from kvlab.server.calls import ClientCall, Mailbox
from kvlab.server.errors import ApiError
from tests.support.engines import make_engine, request


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
        with pytest.raises(ApiError, match="the client reads too slowly: 3 outputs were waiting for it"):
            _ = [event async for event in call.events()]

    asyncio.run(main())
