"""Drawing with matplotlib: one figure per plot, for the page (SVG) and for files (PNG).

Figures are made without pyplot and from matplotlib's own defaults, so that neither the caller's state nor
a user's matplotlibrc changes a byte.

Dimension legend: L routed layers, E experts, S steps.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from miles_olmo.records.expert_load import ExpertLoad
from miles_olmo.records.series import Curve, RunSeries
from miles_olmo.report.notes import has_data
from miles_olmo.report.plots import Line, LinePlot, LoadPlot, Plot, StackPlot
from miles_olmo.report.theme import GRID, LINES, LOAD_COLORS, MUTED, SCHEMES, TYPE

WIDTH = 6.0
"""Inches of one column of the page."""
WIDE = 12.3
HEIGHT = 2.7
PNG_DPI = 160
MOST_COLUMNS = 600
"""Columns of a heat map and points of a stack; more steps are averaged down to them."""
_DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_LOG2_RANGE = 3.0
"""Loads from 1/8 to 8 uniform shares have colours of their own."""


@contextmanager
def drawing_style() -> Iterator[None]:
    """matplotlib's defaults with our type and colours; the caller's settings return afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(TYPE)  # pyright: ignore[reportCallIssue, reportArgumentType]
        yield


def draw(plot: Plot, runs: Sequence[RunSeries]) -> Figure:
    """The figure of a plot; call inside `drawing_style`.

    Args:
        runs: All runs of the report, told apart by a legend; at least one has data for the plot.
    """
    if isinstance(plot, LinePlot):
        return _draw_lines(plot, runs)
    return _draw_stack(plot, runs) if isinstance(plot, StackPlot) else _draw_load(plot, runs)


def to_svg(figure: Figure, label: str) -> str:
    """The figure as an element for a page: its colours are the page's variables."""
    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    FigureCanvasSVG(figure).print_svg(buffer, metadata=metadata)
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    for name, (light, _) in SCHEMES.items():
        text = text.replace(light, f"var(--{name})")
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", text)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
    assert size is not None, "matplotlib writes a viewBox"
    opening = f'<svg viewBox="{size[0][9:-1]}" role="img" aria-label="{label}"'
    opening += ' xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return opening + text[text.index(">") + 1 :]


def to_png(figure: Figure) -> bytes:
    """The figure as the bytes of a PNG file, on white."""
    figure.set_facecolor("white")
    buffer = io.BytesIO()
    figure.set_dpi(PNG_DPI)
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


# Lines


def _draw_lines(plot: LinePlot, runs: Sequence[RunSeries]) -> Figure:
    figure, (axes,) = _panels(1, WIDTH, HEIGHT)
    axes.set_title(plot.title)
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    keys: list[tuple[str, str, object]] = []
    drawn: list[Curve] = []
    for number, series in enumerate(runs):
        for line, curve in plot.curves(series):
            index = plot.lines.index(line)
            is_hidden = any(curve.values == other.values for other in drawn)
            color = LINES[number if len(runs) > 1 else index]
            dash = _DASHES[index if len(runs) > 1 else int(is_hidden)]
            _draw_curve(axes, plot, curve, color, dash)
            keys.append((_key(plot, line, series, len(runs)), color, dash))
            drawn.append(curve)
    _scale(axes, plot, drawn)
    _step_axis(axes)
    if len(keys) > 1 or len(runs) > 1:
        _legend(axes, keys)
    return figure


def _draw_curve(axes: Axes, plot: LinePlot, curve: Curve, color: str, dash: object) -> None:
    is_short = plot.markers or len(curve.steps) == 1
    if plot.smooth and len(curve.steps) > plot.smooth:
        axes.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=0.8)
        means = _running_mean(curve.values, plot.smooth)
        axes.plot(curve.steps, means, color=color, linestyle=dash, linewidth=1.9)
    else:
        marker = "o" if is_short else ""
        axes.plot(
            curve.steps, curve.values, color=color, linestyle=dash, marker=marker, markersize=3.5
        )


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values, of fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return list((sums[ends] - sums[starts]) / (ends - starts))


def _scale(axes: Axes, plot: LinePlot, drawn: Sequence[Curve]) -> None:
    values = [value for curve in drawn for value in curve.values]
    low, high = min(values), max(values)
    if plot.reference is not None:
        axes.axhline(plot.reference, color=MUTED, linewidth=0.8, linestyle=":")
    if plot.scale == "magnitude":
        _magnitude_axis(axes, low, high, values)
    elif plot.is_share:
        axes.set_ylim(-0.03, 1.05)
    elif plot.is_count:
        axes.set_ylim(-0.05 * max(high, 1), 1.1 * max(high, 1))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    elif low == high == 0:
        axes.set_ylim(-0.05, 1.0)
    elif low == high:
        axes.set_ylim(low - 0.1 * abs(low), high + 0.1 * abs(high))
    elif 0 <= low < 0.5 * high:
        axes.set_ylim(bottom=-0.03 * high)


def _magnitude_axis(axes: Axes, low: float, high: float, values: Sequence[float]) -> None:
    """Logarithmic, with room for 0; linear and plain when nothing but 0 was measured."""
    assert low >= 0 or math.isfinite(low)
    smallest = min((abs(value) for value in values if value), default=0.0)
    if not smallest:
        axes.set_ylim(-0.5, 1.0)
        axes.yaxis.set_major_locator(FixedLocator([0.0]))
        axes.text(0.5, 0.5, "exactly 0 at every step", transform=axes.transAxes, ha="center",
                  color=MUTED)  # fmt: skip
        return
    threshold = 10.0 ** math.floor(math.log10(smallest))
    axes.set_yscale("symlog", linthresh=threshold, linscale=0.4)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))
    axes.set_ylim(-threshold * 0.15 if low >= 0 else low * 2, high * 3)


def _power(value: float) -> str:
    """ "0", "0.01", "1e-4"; matplotlib's own powers of ten are formulas, which are off."""
    return f"{value:g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")


def _step_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True))
    axes.margins(x=0.015)


def _key(plot: LinePlot, line: Line, series: RunSeries, num_runs: int) -> str:
    if num_runs == 1:
        return line.label
    run = series.status.run_id
    return run if len(plot.lines) == 1 else f"{run}: {line.label}"


def _legend(axes: Axes, keys: Sequence[tuple[str, str, object]]) -> None:
    """Above the axes, where it hides nothing; a long one makes the figure higher."""
    handles = [axes.plot([], [], color=color, linestyle=dash)[0] for _, color, dash in keys]
    longest = max(len(label) for label, *_ in keys)
    columns = min(len(keys), max(1, 94 // (longest + 7)))
    legend = axes.legend(
        handles,
        [f"{number}" for number in range(len(keys))],  # set below: "_x" would be left out
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=columns,
        borderaxespad=0.1,
        handlelength=2.2,
        columnspacing=1.4,
    )
    for text, (label, *_) in zip(legend.get_texts(), keys, strict=True):
        text.set_text(label)
    rows = -(-len(keys) // columns)
    axes.set_title(axes.get_title("left"), pad=6 + 13 * rows)
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.set_figheight(HEIGHT + 0.17 * max(0, rows - 1))


# Stacks


def _draw_stack(plot: StackPlot, runs: Sequence[RunSeries]) -> Figure:
    shown = [series for series in runs if has_data(plot, series)]
    figure, panels = _panels(len(shown), WIDTH * len(shown), HEIGHT, share_y=True)
    for axes, series in zip(panels, shown, strict=True):
        found = plot.curves(series)
        steps = _binned(found[0][1].steps)
        axes.stackplot(
            steps,
            *[_binned(curve.values) for _, curve in found],
            colors=LINES[: len(found)],
            alpha=0.85,
            linewidth=0,
        )
        _panel_labels(axes, plot, series, len(runs))
        axes.set_ylabel(plot.y_label)
        _legend(axes, [(line.label, LINES[i], "-") for i, (line, _) in enumerate(found)])
        _step_axis(axes)
    return figure


def _panel_labels(axes: Axes, plot: StackPlot, series: RunSeries, num_runs: int) -> None:
    title = plot.title if num_runs == 1 else f"{plot.title}: {series.status.run_id}"
    axes.set_title(title)
    axes.set_xlabel(plot.x_label)


def _binned(values: Sequence[float], most: int = MOST_COLUMNS) -> np.ndarray:
    """Averages of consecutive values, at most `most` of them."""
    size = max(1, -(-len(values) // most))
    return np.array([np.mean(values[i : i + size]) for i in range(0, len(values), size)])


# Expert load


def _draw_load(plot: LoadPlot, runs: Sequence[RunSeries]) -> Figure:
    """A panel per layer, all runs below each other, one colour scale."""
    panels = [
        (series, layer)
        for series in runs
        if has_data(plot, series)
        for layer in range(len(series.expert_load[0].load_LE))
    ]
    experts = max(len(series.expert_load[0].load_LE[0]) for series, _ in panels)
    columns = 1 if len(panels) == 1 else 2
    rows = -(-len(panels) // columns)
    height = min(max(0.14 * experts, 0.9), 1.8)
    figure = Figure(figsize=(WIDE, rows * (height + 0.62) + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    image = None
    for axes, (series, layer) in zip(grid.flat, panels, strict=False):
        image = _heat_map(axes, series.expert_load, layer)
        of_run = "" if len(runs) == 1 else f"{series.status.run_id}: "
        axes.set_title(f"{of_run}layer {layer}", fontsize=9)
        axes.set_xlabel(plot.x_label)
        axes.set_ylabel("expert")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True))
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(plot.title, x=0.008, ha="left", fontsize=10.5, fontweight="bold")
    assert image is not None
    shrink = min(1.0, 2.6 / figure.get_figheight())
    bar = figure.colorbar(
        image, ax=grid, pad=0.012, fraction=0.03, aspect=16, shrink=shrink, anchor=(0.0, 1.0)
    )
    bar.set_label("uniform shares")
    marks = range(-int(_LOG2_RANGE), int(_LOG2_RANGE) + 1)
    bar.set_ticks(list(marks))
    bar.set_ticklabels([f"1/{2**-mark}" if mark < 0 else str(2**mark) for mark in marks])
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    return figure


def _heat_map(axes: Axes, loads: Sequence[ExpertLoad], layer: int):
    first, last = loads[0].step, loads[-1].step
    load_ES = np.full((len(loads[0].load_LE[layer]), last - first + 1), np.nan)
    for load in loads:
        if len(load.load_LE) > layer and len(load.load_LE[layer]) == load_ES.shape[0]:
            load_ES[:, load.step - first] = load.load_LE[layer]
    columns = np.array_split(load_ES, min(load_ES.shape[1], MOST_COLUMNS), axis=1)
    means_ES = np.stack([_mean_of_known(column) for column in columns], axis=1)
    floor = 2.0 ** -(_LOG2_RANGE + 1)
    axes.grid(False)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    return axes.imshow(
        np.log2(np.maximum(means_ES, floor)),
        aspect="auto",
        interpolation="none",
        origin="lower",
        extent=(first - 0.5, last + 0.5, -0.5, load_ES.shape[0] - 0.5),
        cmap=LinearSegmentedColormap.from_list("load", LOAD_COLORS),
        norm=Normalize(-_LOG2_RANGE, _LOG2_RANGE),
    )


def _mean_of_known(column_ES: np.ndarray) -> np.ndarray:
    """Mean over the steps that were trained, NaN where none was."""
    known = ~np.isnan(column_ES[0])
    if not known.any():
        return np.full(column_ES.shape[0], np.nan)
    return column_ES[:, known].mean(axis=1)


def _panels(
    count: int, width: float, height: float, *, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(1, count, sharey=share_y, squeeze=False)
    for axes in grid.flat:
        axes.tick_params(color=GRID, length=3)
    return figure, list(grid.flat)
