"""`miles verify`: one engine and one job that compares it with the trainer, on a checkpoint of a run.

    <run>/verify/verify-1/         a run directory of its own: plan, receipts, logs
      verify.json                  which checkpoint
      verification.json            what was measured

      checkpoint/                while it is verified: the checkpoint's files, which the run may remove

The plan is the run's own with one engine and the verify job in the trainer's place; the run itself,
alive or not, is not touched. A verification that is interrupted before it has a result leaves nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles_olmo.base.codes.entry import EXIT_INTERRUPTED, EXIT_OK, EXIT_VERIFY
from miles_olmo.base.errors import LaunchError, VerificationError
from miles_olmo.base.files import held_directory, write_json
from miles_olmo.base.rundir import RunDirectory, run_of_checkpoint
from miles_olmo.launch.attempts import read_exit_code
from miles_olmo.launch.control import ControlFile, acquire_run
from miles_olmo.launch.preflight import check_machine
from miles_olmo.launch.run_id import create_run_directory
from miles_olmo.launch.supervisor import Supervisor
from miles_olmo.plan.build import plan_jobs
from miles_olmo.plan.hashing import code_version
from miles_olmo.plan.model import RunPlan, content_digest
from miles_olmo.plan.read import check_plan, read_plan, write_plan
from miles_olmo.records.status import read_status

VERIFICATION = "verification.json"
REQUEST = "verify.json"
HELD = "checkpoint"
SCHEMA = "miles-olmo/verification/v1"


@dataclass(frozen=True)
class VerificationResult:
    """How a verification ended."""

    run_id: str
    step: int
    directory: str
    exit_code: int
    """0 passed, 7 a threshold is not met, others as for a run."""
    error: dict[str, Any] | None
    report: dict[str, Any] | None
    """Content of verification.json; None when nothing could be measured."""

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "run_id": self.run_id,
            "step": self.step,
            "directory": self.directory,
            "exit_code": self.exit_code,
            "error": self.error,
            "report": self.report,
        }


def verify_checkpoint_of(
    run: RunDirectory, step: int | None, *, engine: Literal["core", "vllm"] | None = None
) -> VerificationResult:
    """Verify a checkpoint of a run against an engine, and wait for the result.

    Args:
        step: The newest checkpoint when None.
        engine: Kind of engine; the plan's own when None.

    Raises:
        VerificationError: E371, there is no such checkpoint.
        LaunchError: E50x, this machine cannot run it.
        PlanError: E142, an input is not what the plan hashed.
        KeyboardInterrupt: SIGINT, SIGTERM or SIGHUP came before there was a result.
    """
    _checkpoint_step(run, step)
    plan = verification_plan(read_plan(run.plan), engine)
    check_plan(plan)
    check_machine(plan, run.root)
    place = _own_directory(run, plan)
    started = False
    try:
        with _lock(place) as lock, _held_checkpoint(run, step, place) as (chosen, checkpoint):
            ControlFile(place, attempt=1)
            write_plan(plan, place.plan)
            write_json(place.root / REQUEST, {"checkpoint": str(checkpoint), "step": chosen})
            _share_prepared_inputs(run, place)
            started = True
            exit_code = Supervisor(plan, place, 1, lock).supervise()
        result = _result(run, chosen, place, exit_code)
        if result.report is None and exit_code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        return result
    except BaseException as error:
        if not started or isinstance(error, KeyboardInterrupt):
            shutil.rmtree(place.root, ignore_errors=True)
            with contextlib.suppress(OSError):  # another verification has a directory there
                place.root.parent.rmdir()
        raise


def _result(
    run: RunDirectory, step: int, place: RunDirectory, exit_code: int
) -> VerificationResult:
    """What was measured counts, also when an interrupt came after it."""
    path = place.root / VERIFICATION
    report = json.loads(path.read_bytes()) if path.is_file() else None
    recorded = read_exit_code(place, 1)
    if recorded is not None:
        exit_code = recorded
    elif report is not None and exit_code == EXIT_INTERRUPTED:
        exit_code = EXIT_VERIFY if report["failures"] else EXIT_OK
    error = read_status(place.root).error
    return VerificationResult(run.run_id, step, str(place.root), exit_code, error, report)


@contextlib.contextmanager
def _lock(place: RunDirectory) -> Iterator[int]:
    lock = acquire_run(place)
    try:
        yield lock
    finally:
        os.close(lock)


@contextlib.contextmanager
def _held_checkpoint(
    run: RunDirectory, step: int | None, place: RunDirectory
) -> Iterator[tuple[int, Path]]:
    """(step, directory) of the checkpoint, held while a living run removes older ones."""
    with contextlib.ExitStack() as stack:
        while True:
            chosen = _checkpoint_step(run, step)
            source = run.checkpoint(chosen)
            try:
                held = stack.enter_context(held_directory(source, place.root / HELD))
                break
            except FileNotFoundError:
                if os.path.lexists(source):
                    raise  # else the run has removed it, and has newer ones
        yield chosen, held


def verification_plan(plan: RunPlan, engine: Literal["core", "vllm"] | None) -> RunPlan:
    """The run's plan with one engine, one process, and the verify job as its trainer."""
    manifest = plan.manifest
    engines = manifest.engines.model_copy(
        update={
            "count": 1,
            "max_restarts": 0,
            "base_port": 0,
            "kind": engine or manifest.engines.kind,
        }
    )
    parallel = manifest.train.parallel.model_copy(update={"data": 1, "expert": 1})
    train = manifest.train.model_copy(update={"parallel": parallel})
    manifest = manifest.model_copy(update={"engines": engines, "train": train})
    jobs = tuple(
        job.model_copy(update={"module": "miles_olmo.jobs.verify"})
        if job.role == "trainer"
        else job
        for job in plan_jobs(manifest)
        if job.role != "prepare"
    )
    content = plan.content.model_copy(
        update={"manifest": manifest, "jobs": jobs, "code": code_version()}
    )
    return RunPlan(digest=content_digest(content), content=content, local=plan.local)


def _checkpoint_step(run: RunDirectory, step: int | None) -> int:
    steps = run.checkpoint_steps()
    if not steps or (step is not None and step not in steps):
        shown = (
            f"it has checkpoints of steps {', '.join(map(str, steps))}" if steps else "it has none"
        )
        raise VerificationError(
            "E371",
            f"the run {run.run_id} has no checkpoint"
            + ("" if step is None else f" of step {step}"),
            why=shown,
            fix="name one of those with --step"
            if steps
            else "let the run reach its first one (checkpoint.every_steps)",
            steps=steps,
        )
    return steps[-1] if step is None else step


def _own_directory(run: RunDirectory, plan: RunPlan) -> RunDirectory:
    """The first `verify-N` that nobody has, also when several verifications start at once."""
    for number in itertools.count(1):
        if not (run.root / "verify" / f"verify-{number}").exists():
            try:
                return create_run_directory(run.root / "verify", plan, f"verify-{number}")
            except LaunchError as error:
                if error.code != "E500":
                    raise
    raise AssertionError("unreachable")


def _share_prepared_inputs(run: RunDirectory, place: RunDirectory) -> None:
    """Produced inputs and the receipt with their hashes: the jobs check them as in the run."""
    if (run.root / "data").is_dir():
        (place.root / "data").symlink_to(run.root / "data", target_is_directory=True)
    prepared = run.receipt_log("prepare")
    if prepared.is_file():
        place.receipts.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(prepared, place.receipt_log("prepare"))


def checkpoint_target(path: Path) -> tuple[RunDirectory, int] | None:
    """The run and step of a checkpoint directory inside a run; None when it is none."""
    run = run_of_checkpoint(path)
    if run is None:
        return None
    steps = (step for step in run.checkpoint_steps() if run.checkpoint(step) == path.resolve())
    return next(((run, step) for step in steps), None)
