"""Finding a run (by id, unique prefix of an id, path, or "latest") and its logs."""

from __future__ import annotations

import difflib
import shlex
from pathlib import Path

from miles_olmo.base.errors import UsageError
from miles_olmo.base.rundir import RunDirectory

LATEST = "latest"

RUNS_DIRECTORY = Path("runs")
"""Where runs are looked for unless a directory is named; the manifest's own default."""


def resolve_run(text: str, runs_directory: Path) -> RunDirectory:
    """The run that a person means.

    Raises:
        UsageError: E501, there is no such run, or the prefix fits several.
    """
    if text == LATEST:
        return RunDirectory(_latest(runs_directory))
    for path in (runs_directory / text, Path(text)):
        if text and (path / "plan.json").exists():
            return RunDirectory(path.resolve())
    ids = run_ids(runs_directory)
    matches = [run_id for run_id in ids if text and run_id.startswith(text)]
    if len(matches) == 1:
        return RunDirectory((runs_directory / matches[0]).resolve())
    near = matches or difflib.get_close_matches(text, ids, n=3)
    raise UsageError(
        "E501",
        f"there is no run {text!r} in {runs_directory}"
        if not matches
        else f"{text!r} is the beginning of {len(matches)} runs",
        why=f"did you mean {' or '.join(near[:3])}?" if near else _why_none(ids),
        fix="name an id, a unique beginning of one, a run directory, or latest (see miles status)",
        run=text,
        runs_directory=str(runs_directory),
        candidates=near,
    )


def run_reference(directory: str | Path) -> str:
    """What names a run in a command that is typed here: its id in `./runs`, elsewhere its path.

    Quoted for a shell.
    """
    path = Path(directory).absolute()
    is_here = path.parent.resolve() == RUNS_DIRECTORY.resolve()
    return shlex.quote(path.name if is_here else str(path))


def run_ids(runs_directory: Path) -> list[str]:
    """Ids of all runs in a directory, sorted; none when it is absent."""
    if not runs_directory.is_dir():
        return []
    return sorted(p.name for p in runs_directory.iterdir() if (p / "plan.json").exists())


def log_files(run: RunDirectory, attempt: int | None = None) -> dict[str, Path]:
    """Log files by job name, of the newest attempt when `attempt` is None; empty without any."""
    folders = sorted((run.root / "logs").glob("attempt-*"), key=_attempt_number)
    if attempt is not None:
        folders = [folder for folder in folders if _attempt_number(folder) == attempt]
    if not folders:
        return {}
    return {path.stem: path for path in sorted(folders[-1].glob("*.log"))}


def _attempt_number(folder: Path) -> int:
    suffix = folder.name.removeprefix("attempt-")
    return int(suffix) if suffix.isdigit() else 0


def _latest(runs_directory: Path) -> Path:
    """The run that was started or resumed last: its control file is written at each start."""
    paths = [runs_directory / run_id for run_id in run_ids(runs_directory)]
    if not paths:
        raise UsageError(
            "E501",
            f"there is no run in {runs_directory}",
            why="nothing was launched there yet",
            fix="launch one, or name the directory with --runs",
            run=LATEST,
            runs_directory=str(runs_directory),
        )
    return max(paths, key=_last_started).resolve()


def _last_started(path: Path) -> tuple[int, str]:
    run = RunDirectory(path)
    newest = max(
        (p for p in (run.control, run.plan) if p.exists()), key=lambda p: p.stat().st_mtime
    )
    return (newest.stat().st_mtime_ns, path.name)


def _why_none(ids: list[str]) -> str:
    return f"it holds {len(ids)} other runs" if ids else "it holds no runs"
