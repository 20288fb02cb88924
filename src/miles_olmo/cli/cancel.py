"""`miles cancel`: stop a run."""

from __future__ import annotations

import json
from pathlib import Path

import click

from miles_olmo.api.running import RunStatus, cancel, read_status, run_reference
from miles_olmo.cli.options import json_option
from miles_olmo.cli.run_options import run_argument, runs_option


@click.command("cancel")
@run_argument
@runs_option
@json_option
def cancel_command(run: str, runs: Path, as_json: bool) -> None:
    """Stop RUN and wait until nothing of it is left; a run that is over stays as it is."""
    was_running = read_status(run, runs=runs).outcome == "running"
    status = cancel(run, runs=runs)
    if as_json:
        print(json.dumps(status.as_json()))
    elif was_running:
        print(f"{status.run_id} {status.outcome}")
        print(f"  resume   miles launch --resume {run_reference(status.directory)}")
    else:
        print(f"{status.run_id} was not running: it {_ended(status)}")


def _ended(status: RunStatus) -> str:
    if status.copied_from:
        return f"is a copy of {status.copied_from}"
    return "was cancelled" if status.outcome == "cancelled" else status.outcome
