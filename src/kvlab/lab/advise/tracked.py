"""Advice in the tracking store: a run with all files, and one for each change that was better, below it."""

from pathlib import Path

from kvlab.config import TrackingConfig
from kvlab.errors import TrackingError
from kvlab.lab.advise.advice import PLAN, Advice, Figures, Proposal
from kvlab.lab.campaigns.sweep.history import close_parent, open_history
from kvlab.lab.terminal import warn
from kvlab.lab.tracking import RunStatus, Tracker, send_all, start_run
from kvlab.secrets import redact


def track(advice: Advice, tracking: TrackingConfig, directory: Path) -> None:
    """Record it where `tracking` says; a store that fails is warned of."""
    try:
        history = open_history(tracking)
        if history is None:
            return
        params = {"advise.today": advice.today_command, "advise.simulations": advice.simulations}
        parent = history.open_parent(
            "advise", directory.name, history.parent("advise", directory.name), name=directory.name, params=params
        )
        for change in (advice.plan, *advice.proposals):
            _child(change, tracking, parent)
    except TrackingError as error:
        warn(error)
        return
    close_parent(parent, RunStatus.FINISHED, directory, _metrics("today/", advice.today))


def _child(change: Proposal, tracking: TrackingConfig, parent: Tracker) -> None:
    name = f"plan: {change.text}" if change.kind == PLAN else change.text
    child = start_run(
        tracking,
        root=Path(),
        run_name=redact(name)[:250],
        params={"advise.settings": redact(change.text), "advise.cost": change.cost},
        tags={"kvlab.kind": "advice"},
        parent_run_id=parent.run_id,
    )
    gains = {"advice/gain": change.gain.value, "advice/gain_again": change.again.value}
    figures = _metrics("", change.figures) | gains
    send_all(lambda: child.log_metrics(figures), lambda: child.finish(RunStatus.FINISHED))


def _metrics(prefix: str, figures: Figures) -> dict[str, float]:
    """By the names that runs have."""
    found = {
        f"latency/{name}_ms_{part}": value
        for name, values in (("ttft", figures.ttft_ms), ("tpot", figures.tpot_ms))
        for part, value in zip(("p50", "p99"), values, strict=True)
    }
    found |= {"throughput/output_tokens_per_s": figures.tokens_per_s, "fleet/devices": float(figures.devices)}
    if figures.goodput_per_s is not None:
        found["slo/goodput_per_s"] = figures.goodput_per_s
    return {prefix + name: value for name, value in found.items()}
