"""`miles report`: a run as one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from miles_olmo.api.reporting import report
from miles_olmo.cli.options import json_option
from miles_olmo.cli.run_options import run_argument, runs_option
from miles_olmo.cli.terminal import columns, size

if TYPE_CHECKING:
    from miles_olmo.report.writing import ReportResult


@click.command("report")
@run_argument
@click.option("--compare", metavar="RUN2", help="Draw a second run into the same plots.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="The page to write; <run>/report/index.html by default.",
)
@click.option("--png", is_flag=True, help="Also write a PNG file of each plot beside the page.")
@runs_option
@json_option
def report_command(
    run: str, compare: str | None, output: Path | None, png: bool, runs: Path, as_json: bool
) -> None:
    """Write one self-contained HTML page about RUN: plots, counters, samples.

    Reads files only: it works while the run writes them, after it ended, and after a crash. The page
    needs no network. Equal records give equal bytes.
    """
    result = report(run, compare=compare, output=output, png=png, runs=runs)
    print(json.dumps(result.as_json()) if as_json else "\n".join(_shown(result)))


def _shown(result: ReportResult) -> list[str]:
    empty = [(plot.title, note) for plot in result.plots for note in plot.notes]
    images = sum(plot.png is not None for plot in result.plots)
    lines = [f"{result.path} ({size(result.num_bytes)})"]
    lines += [f"{images} PNG files beside it"] if images else []
    return lines + (["without data:", *columns(empty)] if empty else [])
