"""A multirun as one experiment: a parent run, a child run per point, and one table at the end."""

from __future__ import annotations

import csv
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from kvlab.errors import CapacityError, KvlabError, TrackingError

if TYPE_CHECKING:
    from kvlab.lab.execute import RunResult
    from kvlab.lab.tracking import Tracker

# Points may run in other processes (joblib, Slurm): the environment is what they share with the parent.
_PARENT_ENV = "KVLAB_PARENT_RUN_ID"
_KEYS_ENV = "KVLAB_SWEPT_KEYS"
_SIDE_BY_SIDE = 3  # more points than this get a row each instead of a column


@dataclass(slots=True)
class _Sweep:
    directory: Path
    tracker: Tracker
    tracking_error: str | None


_current: _Sweep | None = None


class SweepCallback(Callback):
    """Told by Hydra that a multirun begins. (Its end is `finish`: Hydra does not tell of one that failed.)"""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Open the parent run."""
        _refuse_nested(config)
        _start(config)


def register_callback() -> None:
    """Offer the callback to Hydra as `hydra/callbacks=kvlab`, so that no YAML names a Python object."""
    target = f"{SweepCallback.__module__}.{SweepCallback.__qualname__}"
    ConfigStore.instance().store(group="hydra/callbacks", name="kvlab", node={"kvlab": {"_target_": target}})


def parent_run_id() -> str | None:
    """The sweep's run in the tracking store, in the parent's process or in a point's."""
    return os.environ.get(_PARENT_ENV)


def point_name(overrides: list[str]) -> str:
    """What tells a point from the others: the settings that the sweep varies."""
    keys = os.environ.get(_KEYS_ENV, "").split()
    return " ".join(text for text in overrides if text.split("=")[0] in keys) or "run"


def record_failure(directory: Path, name: str, error: KvlabError) -> None:
    """Keep a point that could not run as a result, and say so; the sweep goes on."""
    from kvlab.lab.artifacts import write_summary

    kind = "does not fit" if isinstance(error, CapacityError) else "failed"
    print(f"{name}: {kind}: {error}", file=sys.stderr)
    if not (directory / "summary.json").exists():
        summary = {"name": name, "status": "failed", "error": str(error), "metrics": {}}
        write_summary(directory, summary)


def stop_if_interrupted(result: RunResult) -> None:
    """End the whole sweep with the point that Ctrl-C ended."""
    if result.status == "interrupted":
        sys.exit(130)


def finish() -> None:
    """Sum up the sweep, if there was one: a table, the parent run's record, the exit code."""
    global _current
    if _current is None:
        return
    sweep, _current = _current, None
    os.environ.pop(_PARENT_ENV, None)
    os.environ.pop(_KEYS_ENV, None)
    points = _read_points(sweep.directory)
    _print_points(points)
    status = _status(points)
    report = sweep.directory / "report"
    _write_csv(points, report / "sweep.csv")
    if sweep.tracking_error is None:
        try:
            sweep.tracker.log_artifacts(report)
            sweep.tracker.finish(status)
            print(sweep.tracker.where())
        except TrackingError as error:
            sweep.tracking_error = str(error)
            print(f"warning: {error}", file=sys.stderr)
    print(f"results: {sweep.directory}")
    if status == "interrupted":
        sys.exit(130)
    if status == "failed" or sweep.tracking_error:
        sys.exit(1)


def _start(config: DictConfig) -> None:
    global _current
    from kvlab.lab.tracking import NullTracker, start_run

    hydra = config.hydra
    directory = Path(hydra.sweep.dir).resolve()
    varied = {str(key): str(value) for key, value in (hydra.sweeper.get("params") or {}).items()}
    for key, _, value in (text.partition("=") for text in hydra.overrides.task):
        # A list, or a function such as range(1,4), makes an override a sweep; a {dict} or a [list] is a value.
        if ("," in value or "(" in value) and not value.startswith(("{", "[")):
            varied[key] = value
    os.environ[_KEYS_ENV] = " ".join(varied)
    choice = hydra.runtime.choices.get("experiment")
    name = config.run_name or choice or "sweep " + " ".join(varied)
    root = Path(__file__).resolve().parents[1]
    tracker: Tracker = NullTracker()
    problem = None
    os.environ.pop(_PARENT_ENV, None)
    try:
        settings: Any = OmegaConf.to_object(config.tracking)
        if settings.backend != "off":
            tracker = start_run(
                settings,
                root=root,
                run_name=name,
                params={f"sweep.{key}": value for key, value in varied.items()},
                tags={"kvlab.kind": "sweep"},
            )
            os.environ[_PARENT_ENV] = tracker.run_id or ""
    except TrackingError as error:
        problem = str(error)
    except KvlabError as error:
        sys.exit(f"error: {error}")
    _current = _Sweep(directory, tracker, problem)


def _refuse_nested(config: DictConfig) -> None:
    """A group that makes a run a sweep cannot be swept itself: Hydra would run it once and say nothing."""
    for text in config.hydra.overrides.task:
        key, _, value = text.partition("=")
        if key in ("sweep", "experiment") and "," in value:
            sys.exit(f"error: {text}: a sweep inside a sweep; run one after the other")


def _read_points(directory: Path) -> list[dict[str, Any]]:
    files = sorted(directory.glob("*/summary.json"), key=lambda file: (len(file.parent.name), file.parent.name))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


def _status(points: list[dict[str, Any]]) -> Any:
    from kvlab.lab.tracking import RunStatus

    found = {point["status"] for point in points}
    for status in (RunStatus.INTERRUPTED, RunStatus.FAILED):
        if status in found or not found:
            return status
    return RunStatus.FINISHED


def _print_points(points: list[dict[str, Any]]) -> None:
    from rich.console import Console

    from kvlab.lab.tables import comparison_table, paging_sentence, points_table

    console = Console()
    console.rule(style="dim")
    if len(points) > _SIDE_BY_SIDE:
        console.print(points_table(points))
        return
    console.print(comparison_table([(point["name"], point["metrics"]) for point in points]))
    for point in points:
        if point["error"]:
            console.print(f"{point['name']}: {point['status']}: {point['error']}", highlight=False, soft_wrap=True)
    by_backend = {point.get("choices", {}).get("kv"): point["metrics"] for point in points}
    if set(by_backend) == {"contiguous", "paged"} and len(points) == 2:
        sentence = paging_sentence(by_backend["contiguous"], by_backend["paged"])
        console.print(f"\n{sentence}", highlight=False)


def _write_csv(points: list[dict[str, Any]], path: Path) -> None:
    metrics = sorted({name for point in points for name in point["metrics"]})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "status", "error", *metrics])
        for point in points:
            row = [point["metrics"].get(name, "") for name in metrics]
            writer.writerow([point["name"], point["status"], point["error"] or "", *row])
