"""`miles logs`: the output of a run's processes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from miles_olmo.api.running import log_files, read_status
from miles_olmo.base.errors import UsageError
from miles_olmo.base.suggest import did_you_mean
from miles_olmo.cli.options import json_option
from miles_olmo.cli.run_options import run_argument, runs_option
from miles_olmo.launch.children import last_lines

LOGS_SCHEMA = "miles-olmo/logs/v1"
_POLL_SECONDS = 0.3


@click.command("logs")
@run_argument
@click.option("--job", help="One job, such as trainer or engine-0; all by default.")
@click.option("--attempt", type=int, help="Attempt of the run; the newest by default.")
@click.option("--lines", type=click.IntRange(min=0), default=20, show_default=True)
@click.option("--follow", is_flag=True, help="Go on printing until the run ends.")
@runs_option
@json_option
def logs_command(
    run: str,
    job: str | None,
    attempt: int | None,
    lines: int,
    follow: bool,
    runs: Path,
    as_json: bool,
) -> None:
    """Show the last lines of the logs of RUN."""
    files = _chosen(log_files(run, attempt=attempt, runs=runs), job)
    ends = {name: path.stat().st_size for name, path in files.items()}
    shown = {name: last_lines(path, lines) for name, path in files.items()}
    if as_json:
        jobs = [{"job": n, "path": str(files[n]), "lines": text} for n, text in shown.items()]
        print(json.dumps({"schema": LOGS_SCHEMA, "logs": jobs}))
        return
    width = max(map(len, files)) if job is None else 0
    for name, text in shown.items():
        _print(name, text, width)
    if follow:
        _follow(run, runs, files, ends, width)


def _chosen(files: dict[str, Path], job: str | None) -> dict[str, Path]:
    if job is None:
        return files
    if job not in files:
        raise UsageError(
            "E519",
            f"there is no log of job {job!r}",
            why=f"the attempt has logs of {', '.join(files)}",
            fix=did_you_mean(job, files),
            jobs=list(files),
        )
    return {job: files[job]}


def _print(name: str, lines: list[str], width: int) -> None:
    for line in lines:
        print(f"{name:<{width}} | {line}" if width else line, flush=True)


def _follow(run: str, runs: Path, files: dict[str, Path], ends: dict[str, int], width: int) -> None:
    """Print whole new lines until the run is over and everything it wrote has been shown."""
    while True:
        is_running = read_status(run, runs=runs).outcome == "running"
        for name, path in files.items():
            with path.open("rb") as file:
                file.seek(ends[name])
                new = file.read()
            whole = new if not is_running else new[: new.rfind(b"\n") + 1]
            ends[name] += len(whole)
            _print(name, whole.decode(errors="replace").splitlines(), width)
        if not is_running:
            return
        time.sleep(_POLL_SECONDS)
