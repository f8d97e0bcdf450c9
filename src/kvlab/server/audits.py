"""Audits of the pool that clients ask for: one at a time, and never most of the engine's time."""

import asyncio
import time

from kvlab.engine.core import EngineCore
from kvlab.engine.service import Engine

_REST = 9  # times as long as the last audit took, before the next one begins: audits take a tenth of the time


class Audits:
    """Clients that ask while an audit waits to begin share it. No step runs during an audit."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._one = asyncio.Lock()  # held from the wait to the end of an audit
        self._next_s = 0.0  # on the monotonic clock: when an audit may begin
        self._waiting: asyncio.Task[list[str]] | None = None

    async def findings(self) -> list[str]:
        """The broken invariants that an audit finds which begins after the call."""
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._audit())
        return await asyncio.shield(self._waiting)

    async def _audit(self) -> list[str]:
        async with self._one:
            await asyncio.sleep(self._next_s - time.monotonic())
            self._waiting = None
            findings, seconds = await asyncio.to_thread(lambda: self._engine.inspect(_look).result())
            self._next_s = time.monotonic() + _REST * seconds
            return findings


def _look(core: EngineCore) -> tuple[list[str], float]:
    """The findings, and how many seconds they took."""
    start = time.monotonic()
    return [str(finding) for finding in core.audit()], time.monotonic() - start
