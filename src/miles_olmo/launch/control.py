"""The live side of a run directory: who supervises it (`control.json`, `lock`) and its token.

The lock is an flock that the supervisor and all of its jobs hold through one inherited descriptor:
it is free exactly when the last of them is gone, however they went.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from typing import Any, Literal

from miles_olmo.base.errors import LaunchError
from miles_olmo.base.files import write_atomic, write_json
from miles_olmo.base.processes import ProcessIdentity
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.children import JobProcess
from miles_olmo.records.runs import run_reference
from miles_olmo.records.status import (
    HEARTBEAT_SECONDS,
    directory_identity,
    is_supervised,
    read_control,
)

CONTROL_SCHEMA = "miles-olmo/control/v1"
_LEFTOVER_SECONDS = 15.0
"""Jobs whose supervisor was killed end themselves well within this."""

State = Literal["created", "starting", "running", "stopping", "ended"]


def acquire_run(run: RunDirectory) -> int:
    """Take the run's lock; waits for jobs of a killed supervisor to end themselves.

    Returns:
        The descriptor that holds the lock; children inherit it.

    Raises:
        LaunchError: E505, the run is alive.
    """
    descriptor = os.open(run.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LEFTOVER_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            supervised = is_supervised(run, read_control(run))
            if supervised or time.monotonic() > deadline:
                os.close(descriptor)
                raise _alive(run, supervised) from None
            time.sleep(0.1)


def _alive(run: RunDirectory, supervised: bool) -> LaunchError:
    return LaunchError(
        "E505",
        f"the run {run.run_id} is alive",
        why="its supervisor works on it, and two would write the same files"
        if supervised
        else "processes of its last attempt still hold its lock, and would write the same files",
        fix=f"wait for it, or stop it: miles cancel {run_reference(run.root)}",
        run=run.run_id,
    )


class ControlFile:
    """`control.json` of one attempt, kept up to date by its supervisor."""

    def __init__(self, run: RunDirectory, attempt: int) -> None:
        identity = ProcessIdentity.of(os.getpid())
        assert identity is not None
        self._run = run
        self._content: dict[str, Any] = {
            "schema": CONTROL_SCHEMA,
            "directory": directory_identity(run),
            "supervisor": identity.as_json(),
            "attempt": attempt,
            "state": "created",
            "jobs": {},
        }
        self._last_beat = 0.0
        self._write()

    def set_state(self, state: State) -> None:
        self._content["state"] = state
        self._write()

    def record_job(self, job: JobProcess, restarts: int) -> None:
        """Note a started process."""
        self._content["jobs"][job.command.name] = {
            "process": job.identity.as_json(),
            "role": job.command.role,
            "started_at": job.started_at,
            "restarts": restarts,
        }
        self._write()

    def follow(self, run: RunDirectory) -> None:
        """Go on where the directory is now."""
        self._run = run
        self._content["directory"] = directory_identity(run)

    def beat(self) -> None:
        """Show that the supervisor lives, to readers on other machines."""
        if time.monotonic() - self._last_beat > HEARTBEAT_SECONDS:
            self._last_beat = time.monotonic()
            os.utime(self._run.control)

    def _write(self) -> None:
        self._last_beat = time.monotonic()
        write_json(self._run.control, self._content)


def create_token(run: RunDirectory) -> None:
    """A fresh bearer token for every endpoint of this attempt, readable by its owner only."""
    run.token.unlink(missing_ok=True)  # `write_atomic` gives the mode to new files only
    write_atomic(run.token, secrets.token_urlsafe(32).encode(), mode=0o600)


def remove_token(run: RunDirectory) -> None:
    run.token.unlink(missing_ok=True)
