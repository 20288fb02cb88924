"""The `local` backend: jobs are processes of this machine under one supervisor.

Attached, the command itself is the supervisor. Detached, the supervisor is a process in a session
of its own, to which the lock of the run is handed over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from miles_olmo.base.codes.entry import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN
from miles_olmo.base.errors import LaunchError
from miles_olmo.base.processes import ProcessIdentity
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.attempts import Attempt, control_state, read_exit_code, set_up_attempt
from miles_olmo.launch.backend import LaunchRequest, LaunchResult, ViewFactory
from miles_olmo.launch.children import last_lines
from miles_olmo.launch.commands import JobCommand, render_jobs
from miles_olmo.launch.interrupts import Interrupts
from miles_olmo.launch.supervisor import Supervisor
from miles_olmo.plan.model import RunPlan
from miles_olmo.records.runs import log_files
from miles_olmo.records.status import (
    RunStatus,
    is_supervised,
    read_control,
    read_status,
    supervisor_identity,
)

SUPERVISOR_LOG = "supervisor"
_POLL_SECONDS = 0.1


class LocalBackend:
    """See the module's docstring."""

    name = "local"

    def render(self, plan: RunPlan, run: RunDirectory, attempt: int) -> list[JobCommand]:
        return render_jobs(plan, run, attempt)

    def submit(self, request: LaunchRequest, view: ViewFactory | None = None) -> LaunchResult:
        attempt = set_up_attempt(request)
        try:
            if request.detach:
                return _result(attempt, _detach(attempt))
            return _attach(attempt, view)
        finally:
            os.close(attempt.lock)

    def status(self, run: RunDirectory) -> RunStatus:
        return read_status(run.root)

    def cancel(self, run: RunDirectory) -> RunStatus:
        """Ask the supervisor to end the run, and wait for it. A run that is over stays as it is.

        Raises:
            LaunchError: E516, the supervisor runs on another machine; E517, it does not end.
        """
        control = read_control(run)
        identity = supervisor_identity(control)
        if identity is None or not is_supervised(run, control):
            return read_status(run.root)
        if not identity.is_here:
            raise LaunchError(
                "E516",
                f"the supervisor of {run.run_id} runs on another machine",
                why="a process can be asked to end only where it runs",
                fix="run miles cancel on that machine",
                run=run.run_id,
            )
        _terminate(identity)
        patience = _stop_seconds(run) + 10
        deadline = time.monotonic() + patience
        while identity.is_alive:
            if time.monotonic() > deadline:
                raise LaunchError(
                    "E517",
                    f"the supervisor of {run.run_id} (pid {identity.pid}) did not end",
                    why=f"it was asked {patience:g} s ago",
                    fix=f"kill -9 {identity.pid}: its jobs end themselves when it is gone",
                    run=run.run_id,
                    pid=identity.pid,
                )
            time.sleep(_POLL_SECONDS)
        return read_status(run.root)

    def logs(self, run: RunDirectory, attempt: int | None = None) -> dict[str, Path]:
        return log_files(run, attempt)


def _attach(attempt: Attempt, view: ViewFactory | None) -> LaunchResult:
    shown = view(attempt.run, attempt.plan) if view else None
    on_tick = shown.update if shown else lambda: None
    supervisor = Supervisor(attempt.plan, attempt.run, attempt.number, attempt.lock, on_tick)
    try:
        exit_code = supervisor.supervise()
    finally:
        if shown:
            shown.close()
    return _result(replace(attempt, run=supervisor.run), exit_code)  # it may have been moved


def _detach(attempt: Attempt) -> int:
    """Start the supervisor in the background and wait until the run is up or over."""
    log = attempt.run.logs(attempt.number) / f"{SUPERVISOR_LOG}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    argv = (
        *(sys.executable, "-m", "miles_olmo.launch.supervise"),
        *("--run", str(attempt.run.root), "--attempt", str(attempt.number)),
        *("--lock", str(attempt.lock)),
    )
    with log.open("ab") as output, Interrupts() as interrupts:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(attempt.lock,),
            start_new_session=True,
        )
        asked = False
        while child.poll() is None:
            if control_state(attempt.run) == (attempt.number, "running"):
                return EXIT_OK
            if interrupts.count and not asked:  # whoever waits for the start no longer wants it
                child.send_signal(signal.SIGTERM)
                asked = True
            time.sleep(_POLL_SECONDS)
    return child.returncode if child.returncode >= 0 else EXIT_RUN


def _result(attempt: Attempt, exit_code: int) -> LaunchResult:
    status = read_status(attempt.run.root)
    recorded = read_exit_code(attempt.run, attempt.number)
    if status.outcome == "cancelled":
        exit_code = EXIT_INTERRUPTED
    elif status.outcome != "running":
        exit_code = recorded if recorded is not None else exit_code
    job = (status.error or {}).get("job")
    if status.outcome == "crashed":
        job = SUPERVISOR_LOG
    log = attempt.run.logs(attempt.number) / f"{job}.log"
    return LaunchResult(
        run_id=status.run_id,
        directory=status.directory,
        attempt=attempt.number,
        outcome=status.outcome,
        exit_code=exit_code,
        error=status.error,
        last_lines=tuple(last_lines(log)) if job else (),
    )


def _terminate(identity: ProcessIdentity) -> None:
    """SIGTERM to exactly this process: through a descriptor of it where the system has them."""
    if not hasattr(os, "pidfd_open"):
        if identity.is_alive:
            os.kill(identity.pid, signal.SIGTERM)
        return
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        if identity.is_alive:  # checked after the descriptor was taken: it is this process
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def _stop_seconds(run: RunDirectory) -> float:
    return RunPlan.model_validate_json(run.plan.read_bytes()).manifest.launch.stop_seconds
