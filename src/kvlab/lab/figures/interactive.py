"""Figures of a run with Plotly, which name what the pointer is on."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from kvlab.core import RequestRecord
from kvlab.lab.figures import style
from kvlab.lab.figures.blocks import PoolGrid
from kvlab.lab.figures.metric_charts import cell_texts
from kvlab.lab.figures.pareto import X_LABEL, Y_LABEL, measured_points, pareto_front
from kvlab.lab.figures.points import THROUGHPUT, Grid, Points
from kvlab.lab.figures.pool_map import HOLDERS, has_one_colour, holder_colours
from kvlab.lab.figures.timeline import from_arrivals, phase_spans, shown_requests
from kvlab.lab.results import catalogue


def timeline_hover(records: Sequence[RequestRecord]) -> Any:
    """A bar for each phase of each request."""
    shown, every = shown_requests(records)
    figure = go.Figure()
    for phase, spans in phase_spans(shown, every).items():
        figure.add_bar(
            name=phase,
            orientation="h",
            y=[span.row for span in spans],
            base=[span.start_s - span.origin_s for span in spans],
            x=[span.end_s - span.start_s for span in spans],
            width=every * 0.85,
            marker={"color": style.PHASES[phase], "line_width": 0},
            customdata=[(span.name, span.start_s, span.end_s) for span in spans],
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>{phase} from %{{customdata[1]:.3f}} s "
            "to %{customdata[2]:.3f} s, %{x:.3f} s<extra></extra>",
        )
    shifted = from_arrivals(shown)
    first = [(1 + index * every, record) for index, record in enumerate(shown) if record.token_times_s]
    figure.add_scatter(
        name="first token",
        mode="markers",
        x=[(record.ttft_ms or 0.0) / 1000 if shifted else record.first_token_s for _, record in first],
        y=[y for y, _ in first],
        marker={"symbol": "line-ns-open", "color": style.BLACK, "size": max(3, 9 - len(shown) // 12)},
        customdata=[(record.name, record.ttft_ms) for _, record in first],
        hovertemplate="<b>%{customdata[0]}</b><br>first token after %{customdata[1]:,.0f} ms<extra></extra>",
    )
    note = "" if every == 1 else f" (one in {every})"
    heading, label = (
        ("from their arrivals on", "time since the request's arrival, s") if shifted else ("over time", "time, s")
    )
    _lay_out(figure, f"Requests {heading}{note}", label, "request, by arrival")
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    return figure


def pool_map_hover(grid: PoolGrid, records: Sequence[RequestRecord], *, unit: str = "block") -> Any:
    """Block by time; the request that holds a block is named at the pointer. `unit` is what a block is called."""
    names = {holder: name for holder, (name, _) in HOLDERS.items()}
    names |= {index: record.name for index, record in enumerate(records)}
    colours = holder_colours(grid)
    palette = list(dict.fromkeys(colours.values()))
    values, where = np.unique(grid.cells, return_inverse=True)
    where = where.reshape(grid.cells.shape)
    colour = np.array([palette.index(colours[value]) for value in values.tolist()], dtype=np.uint8)
    text = np.array([names.get(value, f"sequence {value}") for value in values.tolist()], dtype=object)
    count, width = len(palette), grid.end_s / grid.cells.shape[1]
    figure = go.Figure(
        go.Heatmap(
            z=colour[where],
            x0=width / 2,
            dx=width,
            y0=(grid.blocks_per_row - 1) / 2,
            dy=grid.blocks_per_row,
            text=text[where],
            zmin=-0.5,
            zmax=count - 0.5,
            colorscale=[(edge / count, shade) for n, shade in enumerate(palette) for edge in (n, n + 1)],
            showscale=False,
            hovertemplate=f"{unit} %{{y:.0f}} at %{{x:.3f}} s<br><b>%{{text}}</b><extra></extra>",
        )
    )
    more = f"; a row is {grid.blocks_per_row} {unit}s" if grid.blocks_per_row > 1 else ""
    colour_of = "blue is in use" if has_one_colour(grid) else "a colour is a sequence"
    heading = f"Each {unit} over time: {colour_of}, black shared, grey cached{more}"
    _lay_out(figure, heading, "time, s", unit)
    figure.update_yaxes(autorange="reversed")
    return figure


def heat_map_hover(grid: Grid) -> Any:
    """The throughput, a cell for each pair of values; those that failed are named."""
    figure = go.Figure(
        go.Heatmap(
            z=grid.values,
            x=[str(value) for value in grid.columns],
            y=[str(value) for value in grid.rows],
            text=cell_texts(grid),
            texttemplate="%{text}",
            colorscale="Viridis",
            hoverongaps=True,
            hovertemplate=f"{grid.row_key}=%{{y}}<br>{grid.column_key}=%{{x}}<br><b>%{{text}}</b><extra></extra>",
        )
    )
    _lay_out(figure, f"{catalogue.metric(THROUGHPUT).axis} {grid.footnote}".rstrip(), grid.column_key, grid.row_key)
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category", autorange="reversed")
    return figure


def pareto_hover(points: Points) -> Any:
    """All points with their names, and the front."""
    known = measured_points(points)
    front = pareto_front(known)
    figure = go.Figure()
    for name, members, colour, mode in (
        ("dominated by another", [point for point in known if point not in front], style.FAINT, "markers"),
        ("Pareto front", front, style.BLUE, "lines+markers"),
    ):
        figure.add_scatter(
            name=name,
            mode=mode,
            line={"shape": "hv", "color": colour},
            marker={"color": colour, "size": 9},
            x=[point.latency for point in members],
            y=[point.throughput for point in members],
            text=[point.name for point in members],
            hovertemplate="<b>%{text}</b><br>%{y:,.1f} tokens/s, %{x:,.1f} ms<extra></extra>",
        )
    _lay_out(figure, "Latency and throughput", X_LABEL, Y_LABEL)
    return figure


def embedded(figure: Any, number: int) -> str:
    """A figure as part of a page, the first with plotly.js (some 4.7 MB). `number`: which one of the page it is,
    and not one drawn at random, so that the same figures are the same page.
    """
    options = {"responsive": True, "displaylogo": False}
    name = f"figure-{number}"
    return str(figure.to_html(full_html=False, include_plotlyjs=number == 0, config=options, div_id=name))


def page(heading: str, figures: Iterable[Any], notes: Iterable[str] = ()) -> str:
    """One HTML page with these figures and plotly.js, so that it opens anywhere: in a tracking store's page no
    script beside it would be found.
    """
    parts = [embedded(figure, number) for number, figure in enumerate(figures)]
    parts += [f"<p>{escape(note)}</p>" for note in notes]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title>'
        "<style>body{font-family:sans-serif;margin:1.5em;color:#222}</style></head><body>\n"
        f"<h1 style='font-size:1.2em'>{escape(heading)}</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _lay_out(figure: Any, heading: str, x: str, y: str) -> None:
    figure.update_layout(
        title={"text": escape(heading[:1].upper() + heading[1:]), "font": {"size": 15}, "x": 0, "xref": "paper"},
        template="plotly_white",
        height=520,
        margin={"l": 70, "r": 20, "t": 70, "b": 60},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"},
        xaxis_title=x,
        yaxis_title=y,
    )
