"""Setting up an attempt: a new run, or another start of an old one. No process is started here.

Everything that can be refused is refused before anything is written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from miles_olmo.base.errors import LaunchError
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.backend import LaunchRequest
from miles_olmo.launch.control import ControlFile, acquire_run
from miles_olmo.launch.preflight import check_machine
from miles_olmo.launch.run_id import create_run_directory
from miles_olmo.plan.compare import Difference, check_resume
from miles_olmo.plan.model import RunPlan
from miles_olmo.plan.read import check_plan, read_plan, write_plan
from miles_olmo.records.receipts import ReceiptLog, json_safe, read_chain
from miles_olmo.records.runs import resolve_run
from miles_olmo.records.status import LAUNCHER, read_status


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that is ready to be supervised."""

    run: RunDirectory
    plan: RunPlan
    number: int
    lock: int
    """Descriptor that holds the run's lock."""


def set_up_attempt(request: LaunchRequest) -> Attempt:
    """Make the attempt that a request asks for; the caller owns its lock.

    Raises:
        LaunchError: E500 to E508; E508 also when the run's directory cannot be written.
        PlanError: E142, E143 inputs or code are not those of the plan; E144, E145 a resume with
            changes that are not allowed, or not accepted.
        UsageError: E501, there is no such run to resume.
    """
    try:
        if request.resume is not None:
            return _resume(request, request.resume)
        assert request.plan is not None
        return _begin(request, request.plan)
    except OSError as error:
        path = error.filename2 or error.filename or request.runs
        raise LaunchError(
            "E508",
            f"cannot write {path}: {error.strerror or error}",
            why="everything a run writes goes into its directory",
            fix="make the directory writable, or copy it to a disk that is and name the copy"
            if request.resume is not None
            else "set launch.runs_directory or --runs to a directory that can be written",
            path=str(path),
        ) from error


def _begin(request: LaunchRequest, plan: RunPlan) -> Attempt:
    check_plan(plan)
    check_machine(plan, request.runs)
    run = create_run_directory(request.runs, plan, request.name)
    lock = None
    try:
        lock = acquire_run(run)
        ControlFile(run, attempt=1)
        write_plan(plan, run.plan)
        _accept(run, 1, plan, differences=())
    except BaseException:
        if lock is not None:
            os.close(lock)
        shutil.rmtree(run.root, ignore_errors=True)  # made a moment ago, by us, and of no use
        raise
    return Attempt(run, plan, 1, lock)


def _resume(request: LaunchRequest, text: str) -> Attempt:
    run = resolve_run(text, request.runs)
    lock = acquire_run(run)
    try:
        old = read_plan(run.plan)
        plan = request.plan or old
        differences = check_resume(old, plan, accept_changes=request.accept_changes)
        reached, wanted = max(run.checkpoint_steps(), default=0), plan.manifest.train.steps
        finished = read_status(run.root).outcome == "finished"
        if wanted < reached or (finished and wanted == reached):
            raise LaunchError(
                "E507",
                f"the run {run.run_id} is "
                + ("finished" if finished else f"at step {reached} and train.steps = {wanted}"),
                why="the plan has nothing left to do",
                fix="raise train.steps and pass --accept-changes, or launch a new run",
                run=run.run_id,
            )
        check_plan(plan)
        check_machine(plan, run.root.parent)
        number = 1 + _last_attempt(run)
        if plan.digest != old.digest:
            write_plan(old, run.root / f"plan-attempt-{number - 1}.json")
            write_plan(plan, run.plan)
        ControlFile(run, number)
        _accept(run, number, plan, differences)
    except BaseException:
        os.close(lock)
        raise
    return Attempt(run, plan, number, lock)


def _accept(
    run: RunDirectory, attempt: int, plan: RunPlan, differences: Sequence[Difference]
) -> None:
    receipts = ReceiptLog(run.receipt_log(LAUNCHER), LAUNCHER)
    body: dict[str, Any] = {"attempt": attempt, "plan_digest": plan.digest}
    if differences:
        changes = [asdict(difference) for difference in differences]
        receipts.append("changes-accepted", {**body, "differences": json_safe(changes)})
    receipts.append("plan-accepted", body)


def _last_attempt(run: RunDirectory) -> int:
    numbers = [
        event["body"]["attempt"]
        for event in read_chain(run.receipt_log(LAUNCHER)).events
        if isinstance(event["body"].get("attempt"), int)
    ]
    return max(numbers, default=0)


def read_exit_code(run: RunDirectory, attempt: int) -> int | None:
    """The exit code that a failed attempt recorded; None when it recorded no failure."""
    for event in reversed(read_chain(run.receipt_log(LAUNCHER)).events):
        if event["type"] == "run-failed" and event["body"].get("attempt") == attempt:
            return int(event["body"]["exit_code"])
    return None


def control_state(run: RunDirectory) -> tuple[int, str]:
    """(attempt, state) of `control.json`; (0, "") while it cannot be read."""
    try:
        content = json.loads(run.control.read_bytes())
        return int(content["attempt"]), str(content["state"])
    except (OSError, ValueError, KeyError):
        return 0, ""
