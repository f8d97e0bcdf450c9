"""Figures of a step of an engine with blocks; those of an engine without blocks are None."""

from __future__ import annotations

from kvlab.core import PoolCounters, PoolStats, StepRecord


def counted(record: StepRecord) -> PoolCounters:
    """What the step added to the pool's counters."""
    assert record.counters is not None
    return record.counters


def memory(record: StepRecord) -> PoolStats:
    """The pool once the step was done."""
    assert record.pool is not None
    return record.pool
