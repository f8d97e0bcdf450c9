"""A search: trials that Optuna suggests, kept in a database from which the search goes on."""

import re
from collections.abc import Callable, Iterator, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from kvlab.errors import ConfigError, KvlabError
from kvlab.lab.campaigns.tune.space import Space
from kvlab.lab.campaigns.tune.trials import Ended
from kvlab.lab.results.catalogue import direction
from kvlab.lab.tracking.process import is_alive, this_process
from kvlab.secrets import redact

STORAGE_ERRORS = (optuna.exceptions.StorageInternalError, SQLAlchemyError)
_STARTUP = 8  # trials at random before the sampler learns from them
_MAX_IDLE = 30  # suggestions in a row of which none is new and fits, before the search ends


def open_study(
    storage: str | None, name: str, metric: str, trials: int, known: Sequence[FrozenTrial] = ()
) -> optuna.Study:
    """The study of that name in a database, made where there is none, seeded so that it does not repeat itself.
    Without a database (None) it is kept in memory; `known` are trials that it begins with.

    Trials that a killed search left open are closed. Raises ConfigError for a database that cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    towards = "minimize" if direction(metric).more_is_better is False else "maximize"
    try:
        study = optuna.create_study(storage=storage, study_name=name, direction=towards, load_if_exists=True)
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if not is_alive(trial.user_attrs.get("process")):
                study.tell(trial.number, state=TrialState.FAIL)
        study.add_trials(known)
        seed = len(study.get_trials(deepcopy=False))
    except Exception as error:  # SQLAlchemy's, a driver's, the operating system's
        text = f"cannot be used: {storage_reason(error, storage)}; write for example sqlite:///tune.db"
        raise ConfigError("storage", redact(storage or ""), text) from None  # a cause may quote the address
    study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(_STARTUP, max(3, trials // 3)))
    return study


def storage_reason(error: Exception, storage: str | None) -> str:
    """What a database said, on one line, without statements and passwords."""
    cause = error.__cause__ if isinstance(error, optuna.exceptions.StorageInternalError) else None
    text = " ".join(str(cause or error).split()).partition(" [SQL: ")[0]
    return redact(re.sub(r"^\(\w+\.\w+\) ", "", text), storage or "")[:300]


def counted(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that ran to an end: each of its points once."""
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
    return [t for t in done if "same_as" not in t.user_attrs and ("error" in t.user_attrs or t.value is not None)]


def completed(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that have a value."""
    trials: list[FrozenTrial] = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return trials


def best_trial(study: optuna.Study) -> FrozenTrial | None:
    """The best so far; None where no trial has a value."""
    return study.best_trial if completed(study) else None


def search(
    study: optuna.Study,
    space: Space,
    metric: str,
    trials: int,
    *,
    check: Callable[[dict[str, int]], None],
    measure: Callable[[int, dict[str, int]], Ended],
    ended: list[FrozenTrial],
) -> Iterator[FrozenTrial]:
    """Try until `trials` have run in all, those of earlier searches included; yields each as it ends, with
    the metric as its value.

    A trial that was measured is added to `ended` ahead of the database, which may fail with one of STORAGE_ERRORS.

    `check` raises a KvlabError for a point that does not fit: it is pruned with the reason, and does not count.
    Ends early where the space has nothing new, or a trial was interrupted, which is tried again.
    """
    if not study.get_trials(deepcopy=False):
        study.enqueue_trial(dict(space.start))
    idle = 0
    while len(counted(study)) < trials and idle < _MAX_IDLE:
        trial = study.ask()
        trial.set_user_attr("process", this_process())
        values = space.ask(trial)
        idle += 1
        earlier = next((t for t in counted(study) if t.params == trial.params), None)
        if earlier is not None:
            trial.set_user_attr("same_as", earlier.number)
            _tell(study, trial, earlier.value)
            continue
        try:
            check(values)
        except KvlabError as error:
            trial.set_user_attr("reason", redact(str(error)))
            yield study.tell(trial, state=TrialState.PRUNED)
            continue
        idle = 0
        measured = measure(trial.number, values)
        if measured.interrupted:
            yield _tell(study, trial, None)
            return
        value = measured.metrics.get(metric)
        reason = {"error": measured.error or "no value"} if value is None else {}
        ended.append(_frozen(trial, value, reason))
        for name, text in reason.items():
            trial.set_user_attr(name, text)
        yield _tell(study, trial, value)


def _tell(study: optuna.Study, trial: optuna.Trial, value: float | None) -> FrozenTrial:
    """End a trial; None: it has no value."""
    told: FrozenTrial = study.tell(trial, value, state=TrialState.FAIL if value is None else None)
    return told


def _frozen(trial: optuna.Trial, value: float | None, attributes: dict[str, str]) -> FrozenTrial:
    """A trial as the database would return it."""
    frozen: FrozenTrial = optuna.trial.create_trial(
        state=TrialState.FAIL if value is None else TrialState.COMPLETE,
        params=trial.params,
        distributions=trial.distributions,
        value=value,
        user_attrs=attributes,
    )
    frozen.number = trial.number
    return frozen
