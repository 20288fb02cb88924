"""Run ids: name + short digest + number, such as quickstart-1a2b3c4d-1.

The directory is made by one `mkdir`, which fails when it exists: of two launches at the same
moment, each gets an id of its own, or, with a name given, exactly one gets the name.
"""

from __future__ import annotations

import re
from pathlib import Path

from miles_olmo.base.errors import LaunchError
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.plan.model import RunPlan
from miles_olmo.records.runs import LATEST, run_reference

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def create_run_directory(runs: Path, plan: RunPlan, name: str | None = None) -> RunDirectory:
    """Make the directory of a new run.

    Args:
        runs: Directory of all runs; made when absent.
        plan: Gives the id its name and digest.
        name: The id itself, instead of a made one.

    Raises:
        LaunchError: E500 the id is used or impossible; E508 the directory cannot be written.
    """
    try:
        runs.mkdir(parents=True, exist_ok=True)
        if name is not None:
            return _create_named(runs, name)
        stem = plan.run_stem
        number = 1 + max(_numbers(runs, stem), default=0)
        while True:
            try:
                (runs / f"{stem}-{number}").mkdir()
                return RunDirectory((runs / f"{stem}-{number}").resolve())
            except FileExistsError:
                number += 1
    except OSError as error:
        raise LaunchError(
            "E508",
            f"cannot make a run directory in {runs}: {error.strerror}",
            why="everything a run writes goes there",
            fix="set launch.runs_directory or --runs to a directory that can be written",
            runs_directory=str(runs),
        ) from error


def _create_named(runs: Path, name: str) -> RunDirectory:
    if not _NAME.fullmatch(name) or name == LATEST:
        raise LaunchError(
            "E500",
            f"--name {name!r} cannot be a run id",
            why=f"an id is letters, digits, dots, hyphens, underscores, and not {LATEST!r}",
            fix="choose another name",
            name=name,
        )
    try:
        (runs / name).mkdir()
    except FileExistsError:
        raise LaunchError(
            "E500",
            f"the run id {name!r} is already used in {runs}",
            why="a run's records are never written over",
            fix=f"choose another --name, or continue that run with --resume {run_reference(runs / name)}",
            name=name,
            runs_directory=str(runs),
        ) from None
    return RunDirectory((runs / name).resolve())


def _numbers(runs: Path, stem: str) -> list[int]:
    suffixes = (path.name.removeprefix(f"{stem}-") for path in runs.glob(f"{stem}-*"))
    return [int(suffix) for suffix in suffixes if suffix.isdigit()]
