"""What a search tried, drawn: one page to explore, one picture to keep."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import optuna
from jinja2 import Template
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from optuna.trial import FrozenTrial, TrialState

from kvlab.lab import catalogue
from kvlab.lab.figures.style import (
    BLUE,
    INK,
    VERMILION,
    count,
    logarithmic,
    new_figure,
    nothing,
    plain,
    tidy,
    title,
)
from kvlab.lab.tune.space import SEARCHED

_NAMES = {
    "scheduler.max_batch_size": "sequences at once (max_batch_size)",
    "kv.num_blocks": "blocks (num_blocks)",
    "kv.block_size": "tokens in a block (block_size)",
    "scheduler.max_batched_tokens": "tokens of a step (max_batched_tokens)",
}


def write_trials(study: optuna.Study, path: Path) -> None:
    """A row for each trial: what was set, the value, or why there is none."""
    keys = [key for key in SEARCHED if any(key in trial.params for trial in study.trials)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["trial", "state", *keys, "value", "reason"])
        for trial in study.trials:
            attributes = trial.user_attrs
            reason = attributes.get("reason") or attributes.get("error") or ""
            if "same_as" in attributes:
                reason = f"the same as trial {attributes['same_as']}"
            row = [trial.params.get(key, "") for key in keys]
            value = "" if trial.value is None else trial.value
            writer.writerow([trial.number, trial.state.name.lower(), *row, value, reason])


def draw_search(study: optuna.Study, metric: str) -> Figure:
    """The value trial by trial, how much each setting matters, and the value over each of them."""
    done = _done(study)
    keys = [key for key in SEARCHED if any(key in trial.params for trial in done)]
    figure = new_figure(height=8.4, width=10.5)
    figure.suptitle(f"{metric}: {count(len(done), 'trial')} measured", x=0.01, ha="left", color=INK)
    axes = figure.subplots(3, 2)
    _history(axes[0, 0], study, done, metric)
    _importances(axes[0, 1], study)
    for index, place in enumerate(axes[1:].flat):
        if index < len(keys):
            _slice(place, done, keys[index], metric, study)
        else:
            place.set_axis_off()
    return figure


def write_page(study: optuna.Study, metric: str, command: str, path: Path) -> None:
    """One self-contained page: the best command, the history, importances, slices and contours, to hover over."""
    from optuna import visualization

    done = _done(study)
    label = catalogue.metric(metric).axis
    parts: list[tuple[str, Any]] = []
    if done:
        figure = visualization.plot_optimization_history(study, target_name=label)
        figure.data[0].update(name="trial", marker={"color": BLUE, "size": 7})
        if len(figure.data) > 1:
            figure.data[1].update(name="best so far", line={"color": VERMILION})
        parts.append(("Trial by trial", figure))
    keys = [key for key in SEARCHED if len({trial.params.get(key) for trial in done}) > 1]
    for heading, draw in (
        ("How much each setting matters", _plot_importances),
        ("Each setting", visualization.plot_slice),
        ("Two settings at a time", visualization.plot_contour),
    ):
        if len(done) < 3 or not keys or (draw is visualization.plot_contour and len(keys) < 2):
            continue
        try:
            options = {"params": keys} if draw is not _plot_importances else {}
            parts.append((heading, draw(study, target_name=label, **options)))
        except (ValueError, RuntimeError):  # too few trials, or all of them equal
            continue
    path.write_text(_page(study, metric, command, parts), encoding="utf-8")


def _page(study: optuna.Study, metric: str, command: str, parts: list[tuple[str, Any]]) -> str:
    best = study.best_trial if _done(study) else None
    states = [trial.state for trial in study.trials]
    figures = []
    for number, (heading, figure) in enumerate(parts):
        figure.update_layout(title=None, template="plotly_white", font={"size": 13}, margin={"t": 30, "r": 30})
        figure.for_each_xaxis(_short_title)
        figure.for_each_yaxis(_short_title)
        if heading == "Two settings at a time":
            figure.update_layout(height=900)
        figures.append((heading, figure.to_html(full_html=False, include_plotlyjs=number == 0)))
    value = f"{metric} = {best.value:,.4g} (trial {best.number})" if best else "no trial has a value yet"
    text = (
        f"{states.count(TrialState.COMPLETE)} trials measured, {states.count(TrialState.PRUNED)} left out because "
        f"they do not fit, {states.count(TrialState.FAIL)} failed or interrupted."
    )
    template = Template((Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8"), autoescape=True)
    page: str = template.render(metric=metric, value=value, command=command, text=text, figures=figures)
    return page


def _done(study: optuna.Study) -> list[FrozenTrial]:
    done: list[FrozenTrial] = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return done


def _short_title(axis: Any) -> None:
    """A setting without its group, so that titles side by side do not touch."""
    text = axis.title.text or ""
    if text in SEARCHED:
        axis.title.text = text.rpartition(".")[2]
    elif text.startswith("Hyperparameter"):
        axis.title.text = "share of the differences that it explains" if "Importance" in text else ""
    elif text == "Trial":
        axis.title.text = "trial"


def _plot_importances(study: optuna.Study, target_name: str) -> Any:
    from optuna import visualization

    figure = visualization.plot_param_importances(study, target_name=target_name)
    return figure.update_traces(marker={"color": BLUE})


def _history(axes: Axes, study: optuna.Study, done: list[FrozenTrial], metric: str) -> None:
    title(axes, "Trial by trial")
    if not done:
        nothing(axes, "no trial has a value yet")
        return
    values = [trial.value or 0.0 for trial in done]
    choose = min if catalogue.direction(metric).more_is_better is False else max
    best = [choose(values[: index + 1]) for index in range(len(values))]
    numbers = [trial.number for trial in done]
    axes.scatter(numbers, values, s=22, color=BLUE, label="trial")
    axes.step(numbers, best, where="post", color=VERMILION, label="best so far")
    pruned = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    if pruned:
        low = min(values)
        axes.scatter([t.number for t in pruned], [low] * len(pruned), s=14, marker="x", color="#8A8A8A",
                     label="does not fit")  # fmt: skip
    axes.set(xlabel="trial", ylabel=catalogue.metric(metric).axis)
    axes.legend(frameon=False, fontsize=9)
    plain(axes.yaxis)
    tidy(axes)


def _importances(axes: Axes, study: optuna.Study) -> None:
    title(axes, "How much each setting matters")
    try:
        found = optuna.importance.get_param_importances(study)
    except (ValueError, RuntimeError):
        found = {}
    if not found:
        nothing(axes, "too few trials to tell")
        return
    names = list(found)[::-1]
    axes.barh([name.rpartition(".")[2] for name in names], [found[name] for name in names], color=BLUE)
    axes.set(xlabel="share of the differences that it explains", xlim=(0, 1))
    tidy(axes, grid="x")


def _slice(axes: Axes, done: list[FrozenTrial], key: str, metric: str, study: optuna.Study) -> None:
    points = [(int(trial.params[key]), trial.value) for trial in done if key in trial.params]
    best = study.best_trial
    axes.scatter([x for x, _ in points], [y for _, y in points], s=22, color=BLUE)
    axes.scatter([int(best.params[key])], [best.value], s=70, facecolor="none", edgecolor=VERMILION, linewidth=1.8)
    axes.set_xscale("log")
    values = sorted({x for x, _ in points})
    if len(values) <= 9:
        axes.set_xticks(values, [f"{value:,}" for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        logarithmic(axes.xaxis, values[0], values[-1])
    axes.set(xlabel=_NAMES[key], ylabel=catalogue.metric(metric).axis)
    plain(axes.yaxis)
    tidy(axes)
