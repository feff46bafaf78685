"""The pictures of a run, as figures of Bokeh and the columns that feed them.

Each source of a figure has a name, by which the page finds it to replace or extend its columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, takewhile
from typing import Any, Final

import numpy as np
from bokeh.core.validation import silence
from bokeh.core.validation.warnings import MISSING_RENDERERS
from bokeh.embed import json_item
from bokeh.models import (
    BasicTicker,
    ColorBar,
    ColumnDataSource,
    DatetimeTickFormatter,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    Range1d,
)
from bokeh.palettes import Category20, Viridis256
from bokeh.plotting import figure
from numpy.typing import NDArray

from skerry.history.run_history import RunHistory, VersionView
from skerry.history.series import Point, Series

silence(MISSING_RENDERERS)  # a run without learners has no curves yet

_INK: Final = "#7d8894"  # legible on white and on black
_GRID: Final = "#8894a030"
_MERGED: Final = "#d6336c"
_PALETTE: Final = Category20[20][::2] + Category20[20][1::2]
_ROUND_COUNT: Final = 300
_ADOPTION_COUNT: Final = 2_000
_POINT_COUNT: Final = 10_000  # of all curves of a page
_LOSS_HEIGHT: Final = 340
_MARKED: Final = ("rolled_back", "status_changed", "ejection_changed", "replica")
COLOURINGS: Final = ("contributors", "staleness", "bytes")


def learner_colour(history: RunHistory, learner_id: str) -> str:
    """Returns the colour that a learner has in every picture."""
    return str(_PALETTE[sorted(history.learners).index(learner_id) % len(_PALETTE)])


def curve_columns(points: Iterable[Point]) -> dict[str, list[float]]:
    """Returns a curve's columns; time is in milliseconds since 1970, as browsers count it."""
    finite = [point for point in points if math.isfinite(point.value)]
    return {
        "time": [1000 * point.time_s for point in finite],
        "step": [point.step_count for point in finite],
        "tokens": [point.token_count for point in finite],
        "value": [point.value for point in finite],
    }


def _thinned(columns: dict[str, list[float]], most: int) -> dict[str, NDArray[np.float64]]:
    """Returns every n-th value of columns, the newest among them, as arrays, which take less of a page than lists."""
    stride = -(-len(columns["value"]) // most) or 1
    return {name: np.array(values[::-1][::stride][::-1]) for name, values in columns.items()}


def curves(history: RunHistory) -> dict[str, Series]:
    """Returns the curves of the picture of losses by the names of their sources."""
    losses = {f"loss {name}": view.losses for name, view in sorted(history.learners.items())}
    judged = {f"metric {judge}/{metric}": series for (judge, metric), series in sorted(history.metrics.items())}
    return losses | judged


def loss_figure(history: RunHistory) -> Any:
    """Returns the learners' training losses and what judges report of the merged model."""
    plot = _figure(height=_LOSS_HEIGHT, x_axis_type="datetime", y_axis_label="loss", name="losses")
    known = curves(history)
    for name, series in known.items():
        source = ColumnDataSource(_thinned(curve_columns(series), _POINT_COUNT // len(known)), name=name)
        kind, _, label = name.partition(" ")
        is_judged = kind == "metric"
        line = plot.line(
            "time",
            "value",
            source=source,
            color=_MERGED if is_judged else learner_colour(history, label),
            line_width=3 if is_judged else 1.5,
            legend_label=label,
            name=f"line {name}",
        )
        tips = [("", label), ("value", "@value{0.0000}"), ("step", "@step{0,0}"), ("tokens", "@tokens{0.0a}")]
        plot.add_tools(HoverTool(renderers=[line], tooltips=tips))
    if plot.legend:
        plot.legend.click_policy = "hide"
        plot.legend.visible = len(history.learners) <= len(_PALETTE)
        _move_legend(plot)
    return plot


def version_cells(versions: Iterable[VersionView], rows: Mapping[str, int]) -> list[list[float]]:
    """Returns [row, version, contributors, staleness, bytes] of each version, for the map of versions."""
    return [
        [rows[view.fragment], view.version, view.delta_count, view.staleness, view.update_size_bytes]
        for view in versions
        if view.version > 0 and view.fragment in rows
    ]


def version_columns(history: RunHistory) -> dict[str, list[Any]]:
    """Returns the map of the known versions: three images of fragments by versions, of which those to come are NaN."""
    rows = {name: row for row, name in enumerate(history.fragments)}
    cells = version_cells(history.versions, rows)
    first = int(min((version for _, version, *_ in cells), default=1))
    newest = max((fragment.version for fragment in history.fragments.values()), default=0)
    width = 64 * (1 + (newest - first + 1) * 5 // 4 // 64)  # room for versions to come
    images = np.full((3, max(1, len(rows)), width), np.nan, np.float32)
    for row, version, *values in cells:
        images[:, int(row), int(version) - first] = values
    return {
        **{name: [image] for name, image in zip(COLOURINGS, images, strict=True)},
        "x": [first - 0.5],
        "y": [-0.5],
        "dw": [width],
        "dh": [len(rows)],
    }


def version_figure(history: RunHistory) -> Any:
    """Returns the map of fragments by versions; a click on a cell selects a version."""
    names = list(history.fragments)
    source = ColumnDataSource(version_columns(history), name="versions")
    newest = max((fragment.version for fragment in history.fragments.values()), default=0)
    plot = _figure(
        height=90 + 18 * max(4, len(names)),
        x_axis_label="version",
        x_range=Range1d(max(0.5, newest - 200), max(newest + 1.5, 10.5), bounds=None),
        y_range=Range1d(len(names) - 0.5, -0.5),
        name="version map",
    )
    plot.yaxis.ticker = FixedTicker(ticks=list(range(len(names))))
    plot.yaxis.major_label_overrides = dict(enumerate(names))
    shown = np.asarray(source.data[COLOURINGS[0]][0])
    high = float(np.nanmax(shown)) if np.isfinite(shown).any() else 1.0
    mapper = LinearColorMapper(
        palette=list(Viridis256), low=0, high=max(high, 1.0), nan_color="rgba(0,0,0,0)", name="version colours"
    )
    plot.image(
        COLOURINGS[0], "x", "y", "dw", "dh", source=source, color_mapper=mapper, name="version image", level="image"
    )
    bar = ColorBar(
        color_mapper=mapper,
        ticker=BasicTicker(min_interval=1, num_minor_ticks=0),
        width=8,
        background_fill_alpha=0.0,
        major_label_text_color=_INK,
    )
    plot.add_layout(bar, "right")
    plot.grid.visible = False
    return plot


def round_columns(history: RunHistory) -> dict[str, list[Any]]:
    """Returns the newest rounds as bars from opened to committed."""
    rounds = _newest_rounds(history)
    lasts = [view.last_delta for view in rounds]
    return {
        "fragment": [view.fragment for view in rounds],
        "version": [view.version for view in rounds],
        "opened": [1000 * (view.opened_at_s or 0.0) for view in rounds],
        "closed": [1000 * (view.closed_at_s or 0.0) for view in rounds],
        "committed": [1000 * view.committed_at_s for view in rounds],
        "waited": [view.waited_s for view in rounds],
        "last": ["-" if last is None else last.learner_id for last in lasts],
        "delta_count": [view.delta_count for view in rounds],
    }


def adoption_columns(history: RunHistory) -> dict[str, list[Any]]:
    """Returns when each learner told that it has adopted a version, since the first round that is shown."""
    began_s = _began_s(history)
    names = ("fragment", "time", "learner", "colour", "version")
    colours = {name: learner_colour(history, name) for name in history.learners}
    rows = sorted(
        (
            (fragment, 1000 * time_s, name, colours[name], version)
            for name, view in history.learners.items()
            for (fragment, version), time_s in takewhile(
                lambda adopted: adopted[1] >= began_s, reversed(view.adopted_at_s.items())
            )
        ),
        key=lambda row: row[1],
    )[-_ADOPTION_COUNT:]
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def mark_columns(history: RunHistory) -> dict[str, list[Any]]:
    """Returns when learners and replicas went, roll-backs, and changes of the run's status, since the first round."""
    began_s = _began_s(history)
    shown = takewhile(lambda event: event.time_s >= began_s, reversed(history.events))
    marks = [
        event for event in shown if event.kind in _MARKED or event.text.endswith(("its lease ran out", "has finished"))
    ]
    return {"time": [1000 * mark.time_s for mark in marks], "text": [mark.text for mark in marks]}


def _newest_rounds(history: RunHistory) -> list[VersionView]:
    newest = [*islice(reversed(history.versions), _ROUND_COUNT)][::-1]
    return [view for view in newest if view.opened_at_s is not None and view.closed_at_s is not None]


def _began_s(history: RunHistory) -> float:
    return min((view.opened_at_s or 0.0 for view in _newest_rounds(history)), default=0.0)


def round_figure(history: RunHistory) -> Any:
    """Returns the rounds over time: gathering, merging, and when learners adopted the version."""
    names = list(history.fragments)
    source = ColumnDataSource(round_columns(history), name="rounds")
    plot = _figure(
        height=90 + 24 * max(4, len(names)), x_axis_type="datetime", y_range=names[::-1] or [""], name="round bars"
    )
    gathering = plot.hbar(
        "fragment", left="opened", right="closed", height=0.5, source=source, color="#4dabf7", legend_label="gathering"
    )
    merging = plot.hbar(
        "fragment", left="closed", right="committed", height=0.5, source=source, color="#f59f00", legend_label="merging"
    )
    adopted = plot.scatter(
        "time",
        "fragment",
        source=ColumnDataSource(adoption_columns(history), name="adoptions"),
        color="colour",
        marker="inverted_triangle",
        size=7,
        legend_label="adopted",
    )
    tips = [
        ("", "@fragment @version"),
        ("waited", "@waited{0.0} s"),
        ("last came", "@last"),
        ("of deltas", "@delta_count"),
    ]
    plot.add_tools(HoverTool(renderers=[gathering, merging], tooltips=tips))
    plot.add_tools(HoverTool(renderers=[adopted], tooltips=[("", "@learner adopted @fragment @version")]))
    marks = ColumnDataSource(mark_columns(history), name="marks")
    marked = plot.vspan("time", source=marks, line_color="#e03131", line_alpha=0.6, line_width=2)
    plot.add_tools(HoverTool(renderers=[marked], tooltips=[("", "@text")]))
    _move_legend(plot)
    return plot


def items(history: RunHistory, *figures: Callable[[RunHistory], Any]) -> dict[str, Any]:
    """Returns figures, or all, as JSON values that BokehJS embeds, by the id of their place in the page."""
    places: dict[Callable[[RunHistory], Any], str]
    places = {loss_figure: "losses", version_figure: "version-map", round_figure: "rounds"}
    return {places[made]: json_item(made(history), places[made]) for made in figures or places}


def _move_legend(plot: Any) -> None:
    legend = plot.legend[0]
    legend.background_fill_alpha = legend.border_line_alpha = 0.0
    legend.label_text_color = _INK
    legend.orientation = "horizontal"
    plot.add_layout(legend, "above")


def _figure(**options: Any) -> Any:
    plot = figure(
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,box_zoom,reset",
        toolbar_location="right",
        background_fill_alpha=0.0,
        border_fill_alpha=0.0,
        outline_line_color=None,
        **options,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.grid.grid_line_color = _GRID
    for axis in plot.axis:
        axis.axis_line_color = axis.major_tick_line_color = axis.axis_label_text_color = _INK
        axis.major_label_text_color = _INK
        axis.minor_tick_line_color = None
        axis.axis_label_text_font_style = "normal"
    if options.get("x_axis_type") == "datetime":
        clock, fine = "%H:%M:%S", "%H:%M:%S.%3N"
        plot.xaxis.formatter = DatetimeTickFormatter(
            minutes="%H:%M", hourmin="%H:%M", seconds=clock, minsec=clock, milliseconds=fine, microseconds=fine
        )
    return plot
