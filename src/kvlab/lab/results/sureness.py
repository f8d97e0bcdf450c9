"""How sure a simulated run's latencies are, from errors on deployments that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from kvlab.config import RunConfig
from kvlab.core import RequestRecord
from kvlab.simulation.accuracy import Case, sentence


def how_sure_it_is(
    config: RunConfig, records: Sequence[RequestRecord], replicas: int, *, is_sparse: bool
) -> str | None:
    """Mean ttft and tpot of so many replicas whose steps were timed by measured operations, each with its interval.
    None: no request has both, or no deployment of the framework was measured.
    """
    served = [
        (record, record.ttft_ms, record.tpot_ms, record.e2el_ms)
        for record in records
        if record.ttft_ms is not None and record.tpot_ms is not None
    ]
    if not served or config.hardware is None:
        return None
    begin = min(record.arrival_s for record, *_ in served)
    seconds = max(record.finished_s for record, *_ in served) - begin
    case = Case(
        config.framework.tables,
        config.hardware.name,
        config.model.name,
        is_sparse,
        config.executor.tensor_parallel,
        fmean(record.prompt_tokens for record, *_ in served),
        fmean(len(record.output_token_ids) for record, *_ in served),
        sum(whole or 0 for *_, whole in served) / 1000 / max(seconds, 1e-9) / replicas,
    )
    return sentence(
        case, {"ttft": fmean(ttft for _, ttft, _, _ in served), "tpot": fmean(t for _, _, t, _ in served)}
    )
