"""Every job checks the inputs it reads: nothing has changed since they were hashed."""

from __future__ import annotations

from pathlib import Path

from miles_olmo.base.canonical import file_sha256
from miles_olmo.base.errors import InputError, LaunchError
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.jobs.entry import JobContext
from miles_olmo.plan.model import RunPlan
from miles_olmo.records.receipts import read_chain

PREPARED = "inputs-prepared"
"""Type of the receipt that holds the sha256 of every produced input, by manifest key."""


def checked_input(context: JobContext, key: str) -> Path:
    """Path of an input of a job, see `checked_plan_input`."""
    return checked_plan_input(context.plan, context.run, key)


def checked_plan_input(plan: RunPlan, run: RunDirectory, key: str) -> Path:
    """Path of an input whose bytes are those that were hashed.

    Local inputs are compared with the plan, produced ones with the receipt of the prepare job.

    Raises:
        InputError: E352, the file is missing or its bytes have changed.
        LaunchError: E353, a produced input has no receipt.
    """
    entry = next(item for item in plan.content.inputs if item.key == key)
    path = plan.input_path(key, run.root)
    expected = entry.sha256 or _prepared_sha256(run, key)
    actual = file_sha256(path) if path.is_file() else "no file"
    if actual != expected:
        raise InputError(
            "E352",
            f"{key} = {str(path)!r} is not what was hashed: sha256 {actual}, expected {expected}",
            why="the run would train on other data than its plan and receipts say",
            fix="restore the file, or plan again and start a new run",
        )
    return path


def _prepared_sha256(run: RunDirectory, key: str) -> str:
    chain = read_chain(run.receipt_log("prepare"))
    for event in reversed(chain.events):
        if event["type"] == PREPARED:
            return event["body"]["sha256"][key]
    raise LaunchError(
        "E353",
        f"{key} is made by the plan's prepare job, which has left no receipt in this run",
        why="without its hash the trainer cannot know that it reads the right file",
        fix="start the run with `miles launch`, which runs the prepare job first",
    )
