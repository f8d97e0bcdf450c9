"""From recorded runs to what their common pictures are drawn from."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.lab.compare.groups import differing, settings, short_keys, value_of
from kvlab.lab.figures.capacity import Curve, MeasuredCapacity
from kvlab.lab.figures.sweep import Point
from kvlab.lab.records import RunRecord


def sweep_points(records: Sequence[RunRecord]) -> list[Point]:
    """Runs as points, each with the settings in which they differ, as one would give them on the command line: a
    group's choice (`workload`) stands for all that it decides.
    """
    keys = short_keys(records, differing([settings(record) for record in records]))
    return [
        Point({key: value_of(record, key) for key in keys}, record.metrics, record.status, record.name)
        for record in records
    ]


def measured_capacity(record: RunRecord) -> MeasuredCapacity | None:
    """The most sequences that a run had at once, and the mean of their stored tokens when they stored most."""
    most = [(step.running, step.pool.tokens_stored) for step in record.steps() if step.running and step.pool]
    running, tokens = max(most, default=(0, 0))
    if not tokens:
        return None
    backend = str(record.config.get("kv.backend", "paged"))
    return MeasuredCapacity(backend, tokens / running, running, record.name)


def capacity_inputs(records: Sequence[RunRecord]) -> tuple[dict[str, Curve], list[MeasuredCapacity], str]:
    """The planner's curves for the cache that most of the runs had, those runs' measurements, and a heading.

    Nothing where no run says how large its cache was.
    """
    from kvlab.lab.capacity import capacity_curve

    sizes: dict[tuple[int, int, int], list[RunRecord]] = {}
    for record in records:
        kv_bytes, per_token = record.metrics.get("capacity/kv_bytes"), record.facts.get("kv_bytes_per_token")
        longest = record.config.get("model.max_seq_len")
        if kv_bytes and per_token and isinstance(longest, int):
            sizes.setdefault((int(kv_bytes), int(per_token), longest), []).append(record)
    if not sizes:
        return {}, [], ""
    (kv_bytes, per_token, longest), chosen = max(sizes.items(), key=lambda item: len(item[1]))
    setting = chosen[0].config.get("kv.block_size")
    block = setting if isinstance(setting, int) else 16
    # Whole blocks, from a thirty-second of the longest: between them the curve has steps that a line would cut.
    lengths = sorted({max(1, round(longest * 2 ** (-step / 4) / block)) * block for step in range(4 * 5 + 1)})
    curves = {
        curve.backend: Curve(curve.lengths, curve.sequences)
        for curve in capacity_curve(
            kv_bytes,
            per_token,
            max_seq_len=longest,
            block_size=block,
            lengths=lengths,
        )
    }
    measured = [point for record in chosen if (point := measured_capacity(record)) is not None]
    return curves, measured, f"Sequences that fit in {kv_bytes // per_token:,} token slots, by their mean length"
