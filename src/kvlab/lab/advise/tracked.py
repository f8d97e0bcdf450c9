"""Advice in the tracking store: a run with all files, and one for each change that was better, below it."""

from __future__ import annotations

import sys
from pathlib import Path

from kvlab.config import RunConfig
from kvlab.errors import TrackingError
from kvlab.lab.advise.advice import Advice, Figures, Plan, Proposal
from kvlab.lab.campaigns.sweep.history import close_parent, open_history
from kvlab.lab.tracking import RunStatus, Tracker, send_all, start_run
from kvlab.secrets import redact


def track(advice: Advice, config: RunConfig, directory: Path) -> None:
    """Record it where the configuration says; a store that fails is warned of."""
    try:
        history = open_history(config.tracking)
        if history is None:
            return
        params = {"advise.today": redact(advice.today_command), "advise.simulations": advice.simulations}
        parent = history.open_parent(
            "advise", directory.name, history.parent("advise", directory.name), name=directory.name, params=params
        )
        _child(advice.plan, config, parent)
        for proposal in advice.proposals:
            _child(proposal, config, parent)
    except TrackingError as error:
        print(f"warning: {error}", file=sys.stderr)
        return
    close_parent(parent, RunStatus.FINISHED, directory, _metrics("today", advice.today))


def _child(change: Plan | Proposal, config: RunConfig, parent: Tracker) -> None:
    settings = change.settings if isinstance(change, Proposal) else " ".join(change.settings) or "change nothing"
    name = settings if isinstance(change, Proposal) else f"plan: {settings}"
    child = start_run(
        config.tracking,
        root=Path(),
        run_name=redact(name)[:250],
        params={"advise.settings": redact(settings), "advise.cost": change.cost},
        tags={"kvlab.kind": "advice"},
        parent_run_id=parent.run_id,
    )
    figures = _metrics("", change.figures) | {
        "advice/gain": change.gain.value,
        "advice/gain_again": change.again.value,
    }
    send_all(lambda: child.log_metrics(figures), lambda: child.finish(RunStatus.FINISHED))


def _metrics(prefix: str, figures: Figures) -> dict[str, float]:
    """By the names that runs have."""
    found = {
        "latency/ttft_ms_p50": figures.ttft_ms[0],
        "latency/ttft_ms_p99": figures.ttft_ms[1],
        "latency/tpot_ms_p50": figures.tpot_ms[0],
        "latency/tpot_ms_p99": figures.tpot_ms[1],
        "throughput/output_tokens_per_s": figures.tokens_per_s,
        "fleet/devices": float(figures.devices),
        **({} if figures.goodput_per_s is None else {"slo/goodput_per_s": figures.goodput_per_s}),
    }
    return {f"{prefix}/{name}" if prefix else name: value for name, value in found.items()}
