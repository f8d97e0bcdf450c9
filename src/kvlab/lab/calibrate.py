"""Fits the time of a step to recorded runs: what `kvlab calibrate` computes.

Least squares on relative errors with coefficients that are not negative (Lawson and Hanson, 1974): each term takes
time, and a time that grows faster with more rows is a sum of such terms. Steps that something else on the machine
held up weigh less (Huber, 1964). Intervals come from resampling blocks of successive steps (Künsch, 1989), since
what disturbs a step disturbs the next one too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from kvlab.core import StepRecord
from kvlab.errors import ConfigError
from kvlab.lab.results.tables import new_table
from kvlab.lab.terminal import Terminal
from kvlab.models.config import DecoderConfig
from kvlab.simulation.calibration import Calibration, Subject
from kvlab.simulation.work import NAMES, TERMS, Rows, Work, most, rows

LEAST_STEPS = 50
_OUTLIER = 2.0  # standard deviations of the residuals, from where on a step weighs less
_ROUNDS = 20
_DRAWS = 200
_BLOCK = 10  # steps that are resampled together
_PARTS = 5  # that one run is divided into for held-out errors
_READ, _REPEATED = NAMES.index("read"), NAMES.index("repeated")


@dataclass(frozen=True)
class RealRun:
    """A run whose steps were computed: where it is recorded, what it computed, and on what."""

    name: str
    subject: Subject
    model: DecoderConfig
    machine: str
    threads: int
    kernels: str  # what computed it
    steps: Sequence[StepRecord]


class Errors(NamedTuple):
    """Relative errors of predicted times."""

    median: float  # of a step, without its sign
    p90: float
    total: float  # of all steps together, with its sign

    @classmethod
    def of(cls, predicted: Rows, seconds: Rows) -> Errors:
        """Of the steps of one run, or of several."""
        off, total = np.abs(predicted / seconds - 1), predicted.sum() / seconds.sum() - 1
        return cls(float(np.median(off)), float(np.quantile(off, 0.9)), float(total))


@dataclass(frozen=True)
class Fit:
    """A calibration, and how far it can be trusted: by term the 2.5 and 97.5 % quantiles of its coefficient and its
    share of the time; errors where it was fitted and where it was not.
    """

    calibration: Calibration
    intervals: dict[str, tuple[float, float]]
    shares: dict[str, float]
    steps: int
    residuals: Errors
    held_out: Errors
    parts: str  # what was held out, one after the other
    unseen: list[str]  # terms that no step has


def check(runs: Sequence[RealRun]) -> None:
    """Raise ConfigError for runs of different models or machines, and for too few steps."""
    first = runs[0]
    for run in runs[1:]:
        for what, a, b, same in (
            ("model", first.subject, run.subject, first.subject.same_work(run.subject)),
            ("machine", first.machine, run.machine, first.machine == run.machine),
            ("number of threads", first.threads, run.threads, first.threads == run.threads),
            ("set of kernels", first.kernels, run.kernels, first.kernels == run.kernels),
        ):
            if not same:
                text = f"another {what} than {first.name}: {b}, not {a}; calibrate on runs of one {what} at a time"
                raise ConfigError("run", run.name, text)
    count = sum(len(_kept(run)) for run in runs)
    if count < LEAST_STEPS:
        text = f"{count} step{'s' * (count != 1)} with tokens in {len(runs)} run{'s' * (len(runs) > 1)}"
        raise ConfigError("run", first.name, f"{text}; a calibration needs {LEAST_STEPS} or more: name longer runs")


def _kept(run: RealRun) -> list[StepRecord]:
    """The steps that computed tokens, and nothing twice."""
    return [step for step in run.steps if step.batch_seqs and not step.failed_passes]


def calibrate(runs: Sequence[RealRun], *, repeated_share: float = 1.0, draws: int = _DRAWS) -> Fit:
    """Fit the time of a step to runs of one model on one machine.

    `repeated_share`: the time of a context token that another sequence of the step has read, over that of one that
    comes from memory; used where no run has any. `draws`: how often steps are resampled for the intervals. Raises
    ConfigError as `check` does.
    """
    first = runs[0]
    check(runs)
    kept = [_kept(run) for run in runs]
    count = sum(map(len, kept))
    works = [Work.of(step) for steps in kept for step in steps]
    table = rows(first.model, works)
    seconds = np.array([step.end_s - step.start_s for steps in kept for step in steps])
    share = repeated_share if not table[:, _REPEATED].any() else None
    coefficients = _fit(table, seconds, share)
    groups, parts = _groups([len(steps) for steps in kept])
    predicted = np.empty_like(seconds)
    for group in np.unique(groups):
        held = groups == group
        predicted[held] = table[held] @ _fit(table[~held], seconds[~held], share)
    low, high = np.quantile(_resampled(table, seconds, share, draws), [0.025, 0.975], axis=0)
    intervals = {name: (float(a), float(b)) for name, a, b in zip(NAMES, low, high, strict=True)}
    residuals, held_out = Errors.of(table @ coefficients, seconds), Errors.of(predicted, seconds)
    times = dict(zip(NAMES, (float(number) for number in coefficients), strict=True))
    calibration = Calibration(
        subject=first.subject,
        machine=first.machine,
        threads=first.threads,
        coefficients=times,
        between_s=_between(runs),
        largest=most(works),
        origin={
            "runs": len(runs),
            "steps": count,
            "intervals": {name: list(interval) for name, interval in intervals.items()},
            "residuals": residuals._asdict(),
            "held_out": held_out._asdict(),
        },
    )
    spent = table.sum(axis=0) * coefficients
    shares = dict(zip(NAMES, (float(number) for number in spent / spent.sum()), strict=True))
    unseen = [name for name, column in zip(NAMES, table.T, strict=True) if not column.any()]
    return Fit(calibration, intervals, shares, count, residuals, held_out, parts, unseen)


def _fit(table: Rows, seconds: Rows, repeated_share: float | None) -> Rows:
    """Coefficients `[terms]` in seconds. With a `repeated_share` that of `repeated` follows from that of `read`."""
    scale = np.maximum(table.max(axis=0), 1e-300)
    relative = table / scale / seconds[:, None]
    weights, before = np.ones(len(seconds)), np.zeros(len(scale))
    for _ in range(_ROUNDS):
        solution, _ = nnls(relative * weights[:, None], weights)
        if np.allclose(solution, before, rtol=1e-3, atol=1e-6):
            break
        errors, before = np.abs(relative @ solution - 1), solution
        deviation = max(1.4826 * float(np.median(errors)), 1e-9)
        weights = np.sqrt(np.minimum(1, _OUTLIER * deviation / np.maximum(errors, 1e-12)))
    coefficients: Rows = solution / scale
    coefficients[~table.any(axis=0)] = 0
    if repeated_share is not None:
        coefficients[_REPEATED] = repeated_share * coefficients[_READ]
    return coefficients


def _resampled(table: Rows, seconds: Rows, share: float | None, draws: int) -> Rows:
    """`[draws, terms]`: the coefficients of as many steps, drawn in blocks of successive ones."""
    random = np.random.default_rng(0)
    starts = np.arange(0, len(seconds), _BLOCK)
    drawn = []
    for _ in range(draws):
        chosen = (random.choice(starts, len(starts))[:, None] + np.arange(_BLOCK)).ravel()
        chosen = chosen[chosen < len(seconds)]
        drawn.append(_fit(table[chosen], seconds[chosen], share))
    return np.array(drawn)


def _groups(lengths: Sequence[int]) -> tuple[NDArray[np.int64], str]:
    """What of each step is held out together: its run; of a single run a part of it."""
    if len(lengths) > 1:
        return np.repeat(np.arange(len(lengths)), lengths), f"each of {len(lengths)} runs"
    return np.arange(lengths[0]) * _PARTS // lengths[0], f"each of {_PARTS} parts of the run"


def _between(runs: Sequence[RealRun]) -> float:
    """Seconds from the end of a step with tokens to the start of the next one, which follows at once."""
    gaps = [
        max(0.0, after.start_s - before.end_s)
        for run in runs
        for before, after in zip(run.steps, run.steps[1:], strict=False)
        if before.batch_seqs
    ]
    return float(np.median(gaps)) if gaps else 0.0


def show_fit(fit: Fit, console: Terminal) -> None:
    """Print the coefficients and the errors."""
    calibration = fit.calibration
    table = new_table("one", "takes, us", "95 % interval", "of the time")
    for term in TERMS:
        scale = 1e6 * term.per
        value, (low, high) = calibration.coefficients[term.name], fit.intervals[term.name]
        table.add_row(
            f"{term.per:,} {term.what}" if term.per > 1 else term.what,
            f"{value * scale:,.1f}",
            f"{low * scale:,.1f}-{high * scale:,.1f}",
            "not seen" if term.name in fit.unseen else f"{100 * fit.shares[term.name]:.1f} %",
        )
    table.add_row("wait for the next step", f"{calibration.between_s * 1e6:,.1f}", "", "")
    console.print(
        f"{calibration.subject} on {calibration.machine}, threads: {calibration.threads}; {fit.steps:,} steps\n"
    )
    console.print(table)
    for name, errors in (("where it was fitted", fit.residuals), (f"held out, {fit.parts}", fit.held_out)):
        console.print(
            f"{name}: a step is off by {100 * errors.median:.1f} % in the median, {100 * errors.p90:.1f} % at p90; "
            f"all together by {100 * errors.total:+.1f} %"
        )
