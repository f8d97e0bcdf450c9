"""A pool whose blocks another replica reads."""

from __future__ import annotations

from kvlab.core import FinishReason, Request, RequestRecord, SamplingParams
from kvlab.engine.build import build_engine, plan_engine
from kvlab.kv.lending import lend
from kvlab.kv.pool import BlockPool
from tests.fleet.test_fleet import POOL
from tests.simulation.test_executor import config
from tests.support.model import prompt_for


def test_a_sequence_that_runs_alone_waits_for_blocks_that_are_lent() -> None:
    """It would fail where no memory can come back; here it goes on when the blocks have been read."""
    engine, records = build_engine(plan_engine(config("simulated", **POOL))), list[RequestRecord]()
    pool, lent = engine.pool, list[int]()
    assert isinstance(pool, BlockPool)
    engine.submit(Request("first", prompt_for("first", 61), SamplingParams(max_tokens=2), 0.0))
    while engine.has_work():
        engine.step()
    blocks = pool.index.match(prompt_for("first", 61))
    lent += [lend(pool, blocks) for _ in range(2)]
    engine.lent.update(lent)
    taken = pool.allocate_slot(80)  # 15 are lent, 20 taken: 5 are left
    engine.submit(Request("own", prompt_for("own", 15), SamplingParams(max_tokens=20), 0.0), None, records.append)
    for _ in range(40):
        engine.step()
        assert pool.audit() == []
    assert records == []
    assert len(engine.scheduler.waiting) == 1
    for slot in (*lent, taken):
        pool.free_slot(slot)
    engine.lent.clear()
    engine.scheduler.refused = None
    while engine.has_work():
        engine.step()
    assert [record.finish_reason for record in records] == [FinishReason.LENGTH]
    assert pool.stats().blocks_in_use == 0
