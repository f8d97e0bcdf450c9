"""Audits over HTTP: the engine serves beside them."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvlab.engine.clock import WallClock
from kvlab.engine.service import Engine
from kvlab.kv.audit import Finding
from kvlab.server.audits import Audits
from tests.support.engines import make_engine


def test_those_who_ask_at_once_share_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, begun = Engine(make_engine(clock=WallClock())), list[float]()

    def audit() -> list[Finding]:
        begun.append(time.monotonic())
        time.sleep(0.02)
        return []

    monkeypatch.setattr(engine.core, "audit", audit)

    async def main() -> None:
        audits = Audits(engine)
        assert await asyncio.gather(*(audits.findings() for _ in range(50))) == [[]] * 50
        assert len(begun) == 1
        await audits.findings()

    asyncio.run(main())
    assert len(begun) == 2
    assert begun[1] - begun[0] > 10 * 0.02  # the engine has had nine tenths of the time
