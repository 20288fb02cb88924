"""`miles launch`: start a run and follow it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from miles_olmo.api.running import LaunchResult, load_plan, read_status, run_reference, submit
from miles_olmo.base.errors import UsageError
from miles_olmo.cli.options import json_option, overrides_option
from miles_olmo.launch.summary import outcome_text


@click.command("launch")
@click.argument(
    "target", metavar="[MANIFEST|PLAN]", required=False, type=click.Path(path_type=Path)
)
@click.option("--name", help="The run id itself, instead of name + digest + number.")
@click.option("--detach", is_flag=True, help="Return once the run is up; it goes on by itself.")
@click.option(
    "--resume", metavar="RUN", help="Continue a run: id, beginning of an id, path, or latest."
)
@click.option(
    "--accept-changes",
    is_flag=True,
    help="Resume although the plan differs where a resume allows it.",
)
@click.option(
    "--runs",
    type=click.Path(path_type=Path),
    help="Directory of all runs; launch.runs_directory by default.",
)
@overrides_option
@json_option
def launch_command(
    target: Path | None,
    name: str | None,
    detach: bool,
    resume: str | None,
    accept_changes: bool,
    runs: Path | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Start the run of a manifest (planned first) or of a plan, and follow it.

    Ctrl-C ends everything that was started; a second one does so at once. With --resume alone, the
    run goes on with its own plan.
    """
    from miles_olmo.launch.progress import Progress  # rich is needed for this command only

    if overrides and target is None:
        raise UsageError(
            "E506",
            "--set has no manifest to change",
            why="--resume alone goes on with the run's own plan, which is immutable",
            fix="name the manifest too, and pass --accept-changes",
        )
    plan = load_plan(target, overrides=overrides) if target else None
    result = submit(
        plan,
        runs=runs,
        name=name,
        resume=resume,
        accept_changes=accept_changes,
        detach=detach,
        view=Progress,
    )
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        _show(result)
    return result.exit_code


def _show(result: LaunchResult) -> None:
    if result.outcome == "failed" or result.outcome == "crashed":
        _show_failure(result)
        return
    outcome = outcome_text(read_status(result.directory))
    run = run_reference(result.directory)
    print(f"{result.run_id} {'is up' if result.outcome == 'running' else outcome}")
    print(f"  status   miles status {run}")
    if result.outcome == "running":
        print(f"  logs     miles logs {run} --follow")
        print(f"  stop     miles cancel {run}")
    elif result.outcome == "finished":
        print(f"  samples  miles samples {run}")
        print(f"  files    {result.directory}")
    else:
        print(f"  resume   miles launch --resume {run}")


def _show_failure(result: LaunchResult) -> None:
    error = result.error or {}
    job = error.get("job") or "the supervisor"
    if result.last_lines:
        print(f"last lines of {job}:", file=sys.stderr)
        for line in result.last_lines:
            print(f"  {line}", file=sys.stderr)
    clauses = "; ".join(
        text.rstrip(".;") for key in ("what", "why", "fix") if (text := error.get(key, ""))
    )
    code = f"{error['code']}: " if error.get("code") else ""
    print(f"{result.run_id} {result.outcome}: {job}: {code}{clauses}", file=sys.stderr)
    run = run_reference(result.directory)
    print(f"  logs     miles logs {run}", file=sys.stderr)
    print(f"  resume   miles launch --resume {run}", file=sys.stderr)
