"""What a search tried: as a table, as a page to explore, and as one picture."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from jinja2 import Template
from matplotlib.figure import Figure
from optuna.trial import TrialState

from kvlab.lab.campaigns.tune.space import SEARCHED
from kvlab.lab.campaigns.tune.study import completed
from kvlab.lab.figures.style import BLUE, INK, VERMILION, new_figure, plain, tidy
from kvlab.lab.files import write_text
from kvlab.lab.results import catalogue
from kvlab.lab.results.tables import count


def trial_rows(study: optuna.Study) -> Iterator[list[Any]]:
    """The table of trials.csv: names of columns, then of each trial its settings, its value, or why it has none."""
    keys = [key for key in SEARCHED if any(key in trial.params for trial in study.trials)]
    yield ["trial", "state", *keys, "value", "reason"]
    for trial in study.trials:
        attributes = trial.user_attrs
        reason = attributes.get("reason") or attributes.get("error") or ""
        if "same_as" in attributes:
            reason = f"the same as trial {attributes['same_as']}"
        row = [trial.params.get(key, "") for key in keys]
        yield [trial.number, trial.state.name.lower(), *row, "" if trial.value is None else trial.value, reason]


def draw_search(study: optuna.Study, metric: str) -> Figure:
    """The value of every measured trial: in order, and over each setting. The best trial has a ring."""
    done, best = completed(study), study.best_trial
    keys = [key for key in SEARCHED if key in best.params]
    figure = new_figure(height=3.4, width=2.6 * (1 + len(keys)))
    figure.suptitle(f"{metric}: {count(len(done), 'trial')} measured", x=0.01, ha="left", color=INK)
    panels = figure.subplots(1, 1 + len(keys), sharey=True, squeeze=False)[0]
    values = [trial.value for trial in done]
    for axes, key in zip(panels, ["trial", *keys], strict=True):
        at = [trial.number if key == "trial" else trial.params[key] for trial in done]
        axes.scatter(at, values, s=22, color=BLUE)
        axes.scatter(at[done.index(best)], best.value, s=70, facecolor="none", edgecolor=VERMILION, linewidth=1.8)
        axes.set(xlabel=key.rpartition(".")[2])
        if key != "trial":
            axes.set_xscale("log", base=2)
            plain(axes.xaxis)
        tidy(axes)
    panels[0].set(ylabel=catalogue.metric(metric).axis)
    plain(panels[0].yaxis)
    return figure


def write_page(study: optuna.Study, metric: str, command: str, far: str | None, path: Path) -> None:
    """One page that needs no network: the best command, how `far` its figures may be off, and Optuna's own figures
    of the search. Raises OutputError.
    """
    from optuna import visualization

    from kvlab.lab.figures.interactive import embedded

    done = completed(study)
    keys = [key for key in SEARCHED if len({trial.params.get(key) for trial in done}) > 1]
    plots = {"Trial by trial": visualization.plot_optimization_history}
    if len(done) > 2 and keys:
        plots["How much each setting matters"] = visualization.plot_param_importances
        plots["Each setting"] = visualization.plot_slice
    if len(done) > 2 and len(keys) > 1:
        plots["Two settings at a time"] = visualization.plot_contour
    figures: list[tuple[str, str]] = []
    for heading, plot in plots.items():
        options = {"params": keys} if plot in (visualization.plot_slice, visualization.plot_contour) else {}
        with suppress(ValueError, RuntimeError):  # too few trials, or all of them equal
            figure = plot(study, target_name=catalogue.metric(metric).axis, **options)
            height = 900 if plot is visualization.plot_contour else None
            figure.update_layout(title=None, template="plotly_white", height=height, margin={"t": 30, "r": 30})
            figure.for_each_xaxis(_shorten_title)
            figure.for_each_yaxis(_shorten_title)
            figures.append((heading, embedded(figure, len(figures))))
    best, states = study.best_trial, [trial.state for trial in study.trials]
    template = Template((Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8"), autoescape=True)
    page: str = template.render(
        metric=metric,
        value=f"{metric} = {best.value:,.4g} (trial {best.number})",
        command=command,
        far=far,
        text=f"{states.count(TrialState.COMPLETE)} trials measured, {states.count(TrialState.PRUNED)} left out "
        f"because they do not fit, {states.count(TrialState.FAIL)} failed or interrupted.",
        figures=figures,
    )
    write_text(path, page)


def _shorten_title(axis: Any) -> None:
    """A setting without its group, so that titles side by side do not touch."""
    if axis.title.text in SEARCHED:
        axis.title.text = axis.title.text.rpartition(".")[2]
