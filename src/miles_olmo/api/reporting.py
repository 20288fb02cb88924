"""Reports from Python: what `miles report` does, typed.

from miles_olmo.api.reporting import read_series, report

print(read_series("latest").curve("train", "rollout/reward").last)
print(report("latest", compare="other-run", png=True).path)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_olmo.api.running import RUNS_DIRECTORY, find_run
from miles_olmo.base.errors import UsageError
from miles_olmo.launch.environment import is_importable, pip_line
from miles_olmo.records import series as series_files
from miles_olmo.records.series import RunSeries

if TYPE_CHECKING:
    from miles_olmo.report.writing import ReportResult

__all__ = ["RunSeries", "read_series", "report"]


def read_series(run: str | Path, *, runs: Path = RUNS_DIRECTORY) -> RunSeries:
    """All that a report of a run needs: curves, expert load, counters, samples, facts.

    Raises:
        UsageError: E501.
    """
    return series_files.read_series(find_run(run, runs=runs).root)


def report(
    run: str | Path,
    *,
    compare: str | Path | None = None,
    output: Path | None = None,
    png: bool = False,
    runs: Path = RUNS_DIRECTORY,
) -> ReportResult:
    """Write one self-contained HTML page about a run.

    Args:
        compare: A second run, drawn into the same plots.
        output: The page; `<run>/report/index.html` when None.
        png: Also write a PNG file of each plot beside the page.

    Raises:
        UsageError: E501; E360, a run is compared with itself; E604, the page cannot be written;
            E610, matplotlib is missing.
    """
    directory = find_run(run, runs=runs).root
    directories = [directory]
    if compare is not None:
        directories.append(find_run(compare, runs=runs).root)
        if directories[0].samefile(directories[1]):
            raise UsageError(
                "E360",
                f"the run {directory.name} is compared with itself",
                why="both would be drawn into the same lines",
                fix="name another run with --compare",
                run=directory.name,
            )
    if not is_importable("matplotlib"):
        raise UsageError(
            "E610",
            "matplotlib is not installed",
            why="it draws the plots of a report",
            fix=f"run: {pip_line('report')}",
            extra="report",
        )
    from miles_olmo.report.writing import write_report

    page = directory / "report" / "index.html" if output is None else output
    return write_report([series_files.read_series(path) for path in directories], page, png=png)
