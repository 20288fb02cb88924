"""Starts the jobs of a plan, watches them, and ends everything it started.

One thread, one loop. The jobs are its children, each in a session of its own; they hold a lifeline
and end themselves when this process dies. Who restarts an engine: this supervisor, up to
`engines.max_restarts` times each. Who restarts a trainer: nobody, a person resumes the run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from miles_olmo.base.codes import CODES
from miles_olmo.base.codes.entry import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN
from miles_olmo.base.errors import LaunchError, MilesError
from miles_olmo.base.lifeline import Lifeline
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.children import JobProcess, describe_exit
from miles_olmo.launch.commands import JobCommand, job_environment, render_jobs
from miles_olmo.launch.control import ControlFile, create_token, remove_token
from miles_olmo.launch.engines import EngineWatch
from miles_olmo.launch.environment import machine_facts
from miles_olmo.launch.interrupts import Interrupts
from miles_olmo.launch.place import Place
from miles_olmo.launch.trainer_ranks import LAST_WORDS_SECONDS, first_cause
from miles_olmo.plan.model import RunPlan
from miles_olmo.records.receipts import ReceiptLog, failure_body, read_chain
from miles_olmo.records.runs import run_reference
from miles_olmo.records.status import LAUNCHER

_TICK_SECONDS = 0.1


class _Cancelled(Exception):
    """Somebody asked for the end of the run."""


class Supervisor:
    """One attempt of one run, from the first process to the last."""

    def __init__(
        self,
        plan: RunPlan,
        run: RunDirectory,
        attempt: int,
        lock: int,
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            plan: As written in `run.plan`.
            attempt: From 1.
            lock: Descriptor from `control.acquire_run`; jobs inherit it.
            on_tick: Called about ten times a second, to show progress.
        """
        self.plan, self.run, self.attempt = plan, run, attempt
        self._lock = lock
        self._on_tick = on_tick
        self._receipts = ReceiptLog(run.receipt_log(LAUNCHER), LAUNCHER)
        self._control = ControlFile(run, attempt)
        self._place = Place(run.root)
        self._is_removed = False
        self._lifeline = Lifeline()
        self._interrupts = Interrupts()
        self._jobs: dict[str, JobProcess] = {}
        self._receipts_before: dict[str, int] = {}

    def supervise(self) -> int:
        """Run the attempt to its end and return the exit code of the command.

        Raises:
            LaunchError: E530, E531: the run's own records failed; E521, its directory was removed.
                Everything is ended then too.
        """
        with self._interrupts:
            try:
                self._begin()
                return self._live()
            finally:  # also when our own code or disk fails: leave no process, no token
                self._stop_all()
                remove_token(self.run)
                self._lifeline.close()
                self._control_quietly("ended")
                self._place.close()

    def _begin(self) -> None:
        self._record("attempt-started", plan_digest=self.plan.digest, **self._facts())
        self._control.set_state("starting")
        self.run.logs(self.attempt).mkdir(parents=True, exist_ok=True)
        create_token(self.run)

    def _live(self) -> int:
        try:
            commands = render_jobs(self.plan, self.run, self.attempt)
            for command in commands:
                if command.role == "prepare":
                    self._run_to_its_end(command)
            engines = [self._start_engine(c) for c in commands if c.role == "engine"]
            trainers = [self._start(c) for c in commands if c.role == "trainer"]
            self._watch(engines, trainers)
        except _Cancelled:
            self._stop_all()
            self._record("run-cancelled")
            return EXIT_INTERRUPTED
        except MilesError as error:
            error = self._displacement() or error
            self._stop_all()
            if self._is_removed:
                raise error from None
            return self._fail(error)
        except BaseException as error:  # our own bug: the run must still say that it failed
            self._stop_all()
            self._record("run-failed", job=None, exit_code=EXIT_BUG, error=failure_body(error))
            raise
        self._stop_all()
        self._record("run-finished")
        return EXIT_OK

    # Starting and watching

    def _run_to_its_end(self, command: JobCommand) -> None:
        job = self._start(command)
        while self._exit_of(job) is None:
            self._tick()
        self._require_success(job, "E513")

    def _start(self, command: JobCommand, restarts: int = 0) -> JobProcess:
        receipts = read_chain(self.run.receipt_log(command.name))
        self._receipts_before[command.name] = len(receipts.events)
        environment = job_environment(command, self.run.token, self._lifeline.child_end)
        log = self.run.logs(self.attempt) / f"{command.name}.log"
        if restarts:
            with log.open("a") as file:
                file.write(f"--- started again, restart {restarts} ---\n")
        job = JobProcess(command, log, environment, (self._lifeline.child_end, self._lock))
        self._jobs[command.name] = job
        self._control.record_job(job, restarts)
        self._record("job-started", job=command.name, role=command.role, pid=job.pid)
        return job

    def _start_engine(self, command: JobCommand) -> EngineWatch:
        watch = EngineWatch(command, self.run, self.attempt, self.plan.manifest.engines)
        watch.start(self._start)
        return watch

    def _watch(self, engines: list[EngineWatch], trainers: list[JobProcess]) -> None:
        """Until every trainer has ended well. The trainer is looked at first: its own account of
        a failure says more than that of an engine it has lost."""
        announced = False
        while True:
            self._tick()
            for job in trainers:
                if self._exit_of(job):
                    raise self._trainer_failure(trainers)
            if all(job.exit_code == 0 for job in trainers):
                return
            for engine in engines:
                self._watch_engine(engine)
            if not announced and all(engine.is_ready for engine in engines):
                announced = True
                self._control.set_state("running")

    def _trainer_failure(self, trainers: list[JobProcess]) -> LaunchError:
        """The failure of the trainer process that ended first for a reason of its own.

        When one process ends, the others notice within moments and end, too. They get a few seconds
        to say why; those that cannot (a hung one) are ended with everything else.
        """
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < deadline:
            if all(self._exit_of(job) is not None for job in trainers):
                break
            self._tick()
        ended = [job for job in trainers if job.exit_code]
        reports = {job.command.name: self._reported_failure(job.command.name) for job in ended}
        return self._failure_of(first_cause(ended, reports), "E512")

    def _watch_engine(self, engine: EngineWatch) -> None:
        exit_code = self._exit_of(engine.job)
        if exit_code is None:
            if engine.became_ready():
                self._record("engine-ready", job=engine.command.name, url=engine.url)
            elif (silent := engine.seconds_hung()) is not None:
                # A hung engine cannot be asked to end; its end is then handled as any other.
                self._record("engine-hung", job=engine.command.name, seconds=round(silent, 1))
                engine.job.signal_group(signal.SIGKILL)
            return
        reported = self._reported_failure(engine.command.name)
        if not engine.may_restart or (reported and not engine.is_ready):
            raise engine.death(
                exit_code
            )  # an engine that says why it cannot start will say it again
        ended = {"job": engine.command.name, "exit_code": exit_code, "error": reported}
        self._record("engine-restarted", restart=engine.restarts + 1, **ended)
        engine.restart(self._start)

    def _exit_of(self, job: JobProcess) -> int | None:
        """Exit code of a job; its receipt is written when it is first seen."""
        seen = job.exit_code
        exit_code = job.poll()
        if exit_code is not None and seen is None:
            role = job.command.role
            self._record(
                "job-exited", job=job.command.name, role=role, pid=job.pid, exit_code=exit_code
            )
        return exit_code

    def _require_success(self, job: JobProcess, code: str) -> None:
        if job.exit_code != 0:
            raise self._failure_of(job, code)

    def _failure_of(self, job: JobProcess, code: str) -> LaunchError:
        assert job.exit_code
        return LaunchError(
            code,
            f"{job.command.name} {describe_exit(job.exit_code)}",
            why="the run cannot go on without it",
            fix=f"read its log: miles logs {run_reference(self.run.root)} --job {job.command.name}",
            job=job.command.name,
            exit_code=job.exit_code,
        )

    def _tick(self) -> None:
        if self._interrupts.count:
            raise _Cancelled
        if error := self._displacement():
            raise error
        self._control.beat()
        self._on_tick()
        time.sleep(_TICK_SECONDS)

    def _displacement(self) -> LaunchError | None:
        """Why the run cannot go on when its directory is no longer where the jobs look for it.

        From then on the supervisor's own records are written where the directory is.
        """
        if self._place.is_at(self.run.root):
            return None
        before, now = self.run.root, self._place.path()
        self._is_removed = now is None
        if now is not None:
            self.run = RunDirectory(now)
            self._receipts = ReceiptLog(self.run.receipt_log(LAUNCHER), LAUNCHER)
            self._control.follow(self.run)
        return LaunchError(
            "E521",
            f"the run's directory {before} was " + (f"moved to {now}" if now else "removed"),
            why="its processes know it by its path, and can write nothing more",
            fix=f"continue it where it is now: miles launch --resume {run_reference(self.run.root)}"
            if now
            else "launch a new run",
            directory=str(before),
            moved_to=str(now) if now else None,
        )

    # Ending

    def _stop_all(self) -> None:
        """SIGTERM, the grace period of the manifest, SIGKILL. A second interrupt skips the grace."""
        running = [job for job in self._jobs.values() if self._poll_quietly(job) is None]
        if not running:
            return
        self._control_quietly("stopping")
        for job in running:
            job.signal_group(signal.SIGTERM)
        interrupts = max(self._interrupts.count, 1)
        deadline = time.monotonic() + self.plan.manifest.launch.stop_seconds
        while any(self._poll_quietly(job) is None for job in running):
            if time.monotonic() > deadline or self._interrupts.count > interrupts:
                for job in running:
                    job.signal_group(signal.SIGKILL)
                deadline = float("inf")
            time.sleep(_TICK_SECONDS / 2)

    def _poll_quietly(self, job: JobProcess) -> int | None:
        """Ending must go on even when receipts cannot be written any more."""
        try:
            return self._exit_of(job)
        except (MilesError, OSError):
            return job.exit_code

    def _control_quietly(self, state: Any) -> None:
        if self._is_removed:  # what was removed is not made anew
            return
        try:
            self._control.set_state(state)
        except OSError:
            pass

    def _fail(self, error: MilesError) -> int:
        """Record why the run failed; the failing job's own error, when it left one, comes first."""
        job = error.details.get("job")
        reported = self._reported_failure(job) if job else None
        code = (reported or {}).get("code", "")
        exit_code = CODES[code].exit_code if code in CODES else EXIT_RUN
        body = reported or failure_body(error)
        self._record("run-failed", job=job, exit_code=exit_code, error=body, seen=error.what)
        return exit_code

    def _reported_failure(self, job: str) -> dict[str, Any] | None:
        """The `job-failed` event that a job wrote since it was last started."""
        events = read_chain(self.run.receipt_log(job)).events[self._receipts_before.get(job, 0) :]
        failures = [event["body"] for event in events if event["type"] == "job-failed"]
        return failures[-1] if failures else None

    # Records

    def _record(self, type: str, **body: Any) -> None:
        self._receipts.append(type, {"attempt": self.attempt, **body})

    def _facts(self) -> dict[str, Any]:
        return {
            **machine_facts(),
            "git_commit": self.plan.local.git_commit,
            "supervisor_pid": os.getpid(),
        }
