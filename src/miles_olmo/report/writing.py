"""`write_report`: the page, and the PNG files beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from miles_olmo.base.errors import UsageError
from miles_olmo.base.files import write_atomic
from miles_olmo.records.series import RunSeries
from miles_olmo.report.drawing import draw, drawing_style, to_png, to_svg
from miles_olmo.report.notes import has_data, why_empty
from miles_olmo.report.page import DOCTYPE, DrawnPlot, render_page
from miles_olmo.report.plots import PLOTS, Plot

REPORT_SCHEMA = "miles-olmo/report/v1"


@dataclass(frozen=True, slots=True)
class PlotResult:
    """One plot of a report."""

    name: str
    title: str
    png: str | None
    """Path of its PNG file, if one was written."""
    notes: tuple[str, ...]
    """Why a run has no data for it, one per run that has none."""


@dataclass(frozen=True, slots=True)
class ReportResult:
    """What was written."""

    path: str
    run_ids: tuple[str, ...]
    num_bytes: int
    plots: tuple[PlotResult, ...]

    def as_json(self) -> dict[str, Any]:
        return {"schema": REPORT_SCHEMA, **asdict(self)}


def write_report(runs: Sequence[RunSeries], output: Path, *, png: bool = False) -> ReportResult:
    """Write the report of a run, or of several side by side. Equal records give equal bytes.

    Args:
        runs: The run, and those that it is compared with.
        output: The page; its directory is made.
        png: Also write `<plot>.png` beside the page, for each plot with data.

    Raises:
        UsageError: E604, the page or an image cannot be written, or the page would replace a file
            that is none.
    """
    _require_page(output)
    drawn, results = [], []
    with drawing_style():
        for plot in PLOTS:
            with_data = [series for series in runs if has_data(plot, series)]
            notes = tuple(_note(plot, series, runs) for series in runs if series not in with_data)
            image = output.with_name(f"{plot.name}.png")
            svg = ""
            if with_data:
                figure = draw(plot, runs)
                svg = to_svg(figure, plot.title)
                if png:
                    _write(image, to_png(figure))
            drawn.append(DrawnPlot(plot, svg, notes))
            results.append(
                PlotResult(plot.name, plot.title, str(image) if png and with_data else None, notes)
            )
    page = render_page(runs, drawn).encode("utf-8", "replace")
    _write(output, page)
    ids = tuple(series.status.run_id for series in runs)
    return ReportResult(str(output), ids, len(page), tuple(results))


def _note(plot: Plot, series: RunSeries, runs: Sequence[RunSeries]) -> str:
    reason = why_empty(plot, series)
    return reason if len(runs) == 1 else f"{series.status.run_id}: {reason}"


def _require_page(output: Path) -> None:
    """Refuse to replace a file that is no page, such as a record of the run, before drawing."""
    try:
        with output.open("rb") as file:
            found = file.read(len(DOCTYPE))
    except OSError:
        if output.name:
            return  # absent, or named when it is written
        found = b""
    if found.lower() != DOCTYPE.encode():
        raise UsageError(
            "E604",
            f"cannot write {output}: it is there and no page",
            why="what it holds would be lost",
            fix="name another file with --output, or remove it",
            path=str(output),
        )


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise UsageError(
            "E604",
            f"cannot write {path}: {error.strerror or error}",
            why="the report is a file",
            fix="name another one with --output",
            path=str(path),
        ) from error
