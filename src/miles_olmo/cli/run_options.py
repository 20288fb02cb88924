"""Options of the commands that look at runs."""

from __future__ import annotations

from pathlib import Path

import click

from miles_olmo.api.running import RUNS_DIRECTORY

runs_option = click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=RUNS_DIRECTORY,
    show_default=True,
    help="Directory of all runs.",
)

run_argument = click.argument("run")
