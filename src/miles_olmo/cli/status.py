"""`miles status`: runs, from their receipts and metrics."""

from __future__ import annotations

import json
from pathlib import Path

import click

from miles_olmo.api.running import RunStatus, list_runs, read_status, run_reference
from miles_olmo.cli.options import json_option
from miles_olmo.cli.run_options import runs_option
from miles_olmo.cli.terminal import columns, count
from miles_olmo.launch.summary import (
    attempt_seconds,
    curve,
    duration,
    engines_text,
    figures,
    outcome_text,
    progress_text,
    seconds_since,
    sparkline,
)

RUNS_SCHEMA = "miles-olmo/runs/v1"
NUM_PROBLEMS = 20
"""Damaged records that are listed; the rest are counted."""


@click.command("status")
@click.argument("run", required=False)
@runs_option
@json_option
def status_command(run: str | None, runs: Path, as_json: bool) -> None:
    """Show one RUN (id, beginning of an id, path, or latest), or all of them.

    Reads files only: it works while the run writes them, after it ended, and after a crash.
    """
    if run is None:
        statuses = list_runs(runs)
        if as_json:
            print(json.dumps({"schema": RUNS_SCHEMA, "runs": [s.as_json() for s in statuses]}))
        else:
            print("\n".join(_table(statuses)) if statuses else f"no runs in {runs}")
        return
    status = read_status(run, runs=runs, every_record=True)
    print(json.dumps(status.as_json()) if as_json else "\n".join(_page(status)))


def _table(statuses: list[RunStatus]) -> list[str]:
    rows = [("run", "outcome", "since", "progress", "reward", "accuracy")]
    for status in statuses:
        shown = figures(status)
        since = f"{duration(seconds_since(status.since))} ago"
        reward, accuracy = shown.get("reward", "-"), shown.get("accuracy", "-")
        outcome = outcome_text(status)
        rows.append((status.run_id, outcome, since, progress_text(status), reward, accuracy))
    return columns(rows, indent=0)


def _page(status: RunStatus) -> list[str]:
    since = f"since {status.since} ({duration(seconds_since(status.since))} ago)"
    rows = [
        ("outcome", f"{outcome_text(status)} {since}"),
        ("progress", progress_text(status)),
        ("attempt", f"{status.attempt}, {duration(attempt_seconds(status))}"),
        *figures(status).items(),
    ]
    rewards = [value for _, value in curve(status, "train", "rollout/reward")]
    if len(rewards) > 1:
        rows.append(("reward curve", sparkline(rewards)))
    accuracies = [
        f"{step}: {value:.3f}" for step, value in curve(status, "evaluation", "eval/accuracy")
    ]
    if accuracies:
        rows.append(("evaluations", ", ".join(accuracies)))
    if status.skipped_steps:
        rows.append(("skipped steps", f"{status.skipped_steps}: no group carried signal"))
    if status.checkpoints:
        rows.append(("checkpoints", ", ".join(f"step {step}" for step in status.checkpoints)))
    if status.exported:
        rows.append(("export", str(Path(status.directory) / "export")))
    if status.outcome == "running":
        rows.append(("engines", engines_text(status)))
    rows.append(("plan", status.plan_digest))
    rows.append(("files", status.directory))
    lines = [status.run_id, *columns(rows)]
    lines += _jobs(status) + _attempts(status) + _troubles(status)
    return lines


def _jobs(status: RunStatus) -> list[str]:
    rows = []
    for job in status.jobs:
        state = (
            "alive" if job.alive else "ended" if job.exit_code is None else f"exit {job.exit_code}"
        )
        restarts = f"{job.restarts} restarts" if job.restarts else ""
        rows.append((job.name, f"pid {job.pid}", state, restarts))
    return ["jobs", *columns(rows)] if rows else []


def _attempts(status: RunStatus) -> list[str]:
    if len(status.attempts) < 2:
        return []
    rows = [(str(a.number), a.started_at, a.ended_at or "-", a.outcome) for a in status.attempts]
    return ["attempts", *columns(rows)]


def _troubles(status: RunStatus) -> list[str]:
    lines = []
    if status.error:
        error = status.error
        code = f"{error['code']}: " if error.get("code") else ""
        clauses = "; ".join(t for key in ("what", "why", "fix") if (t := error.get(key)))
        lines.append(f"error of {error.get('job') or 'the supervisor'}: {code}{clauses}")
    if status.copied_from:
        lines.append(f"nothing works on it: it was copied from {status.copied_from}")
    elif status.outcome == "crashed":
        lines.append(
            "its supervisor is gone and wrote no ending (killed, or the machine went down)"
        )
    if status.outcome in ("crashed", "failed", "cancelled"):
        lines.append(f"continue it: miles launch --resume {run_reference(status.directory)}")
    lines += _warnings(status)
    lines += [f"damaged: {problem}" for problem in status.problems[:NUM_PROBLEMS]]
    if len(status.problems) > NUM_PROBLEMS:
        lines.append(f"damaged: {len(status.problems) - NUM_PROBLEMS:,} more (all with --json)")
    return lines


def _warnings(status: RunStatus) -> list[str]:
    """What does not stop a run, and should not be overlooked."""
    train = status.latest.get("train")
    values = train.values if train else {}
    lines = []
    if collapsed := values.get("router/collapsed_experts"):
        lines.append(
            f"{count(int(collapsed), 'expert')} collapsed; "
            f"which, see: miles report {run_reference(status.directory)}"
        )
    for name, faults in values.items():
        if name.startswith("logging/") and faults:
            tracker = name.removeprefix("logging/").removesuffix("_faults")
            lines.append(f"{tracker}: {count(int(faults), 'fault')}, see receipts/trainer.jsonl")
    return lines
