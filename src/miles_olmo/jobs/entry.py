"""What every job does before and after its own work.

A job is started as `python -m miles_olmo.jobs.X --plan FILE --digest SHA --run DIR --attempt N`.
It recomputes the plan's digest before anything else, ends itself when its supervisor dies, and
leaves a `job-failed` receipt with the error when it fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles_olmo.base.codes.entry import EXIT_BUG
from miles_olmo.base.errors import LaunchError, MilesError
from miles_olmo.base.lifeline import hold_lifeline
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.plan.model import RunPlan
from miles_olmo.plan.read import read_plan
from miles_olmo.records.receipts import ReceiptLog
from miles_olmo.wire.protocol import RANK_SUFFIX, TOKEN_VARIABLE


@dataclass(frozen=True)
class JobContext:
    """What a job was started with."""

    name: str
    """Name of the process, e.g. "trainer", "trainer-rank-1" or "engine-0"."""
    plan: RunPlan
    run: RunDirectory
    attempt: int
    index: int
    """Which of several jobs of the same role."""
    host: str
    port: int
    """Port to bind to; 0 for any."""
    receipts: ReceiptLog
    rank: int = 0
    """Which of several processes of the same job."""

    @property
    def job(self) -> str:
        """Name of the job in the plan."""
        return self.name.partition(RANK_SUFFIX)[0]

    def read_token(self) -> str:
        """The run's bearer token, from the file that the launcher names in the environment.

        Raises:
            LaunchError: the variable is not set or the file cannot be read.
        """
        path = os.environ.get(TOKEN_VARIABLE, "")
        try:
            return Path(path).read_text().strip()
        except OSError as error:
            raise LaunchError(
                "E354",
                f"the run's token cannot be read from {TOKEN_VARIABLE}={path!r}: {error.strerror}",
                why="jobs and engines recognise each other by it",
                fix="start jobs with `miles launch`",
            ) from error


def run_job(role: str, work: Callable[[JobContext], None], argv: list[str] | None = None) -> None:
    """Parse the command line of a job, check the plan, do the work, exit with its code."""
    arguments = _parser(role).parse_args(argv)
    name = f"{role}-{arguments.index}" if role == "engine" else role
    if arguments.rank:
        name += f"{RANK_SUFFIX}{arguments.rank}"
    hold_lifeline()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run = RunDirectory(Path(arguments.run).resolve())
    receipts = ReceiptLog(run.receipt_log(name), name)
    try:
        plan = read_plan(Path(arguments.plan), expected_digest=arguments.digest)
        context = JobContext(
            name,
            plan,
            run,
            arguments.attempt,
            arguments.index,
            arguments.host,
            arguments.port,
            receipts,
            arguments.rank,
        )
        work(context)
    except MilesError as error:
        receipts.append_failure(error)
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except Exception as error:
        traceback.print_exc()
        receipts.append_failure(error)
        sys.exit(EXIT_BUG)


def _parser(role: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m miles_olmo.jobs.{role}")
    parser.add_argument("--plan", required=True, help="plan file")
    parser.add_argument("--digest", required=True, help="sha256 the plan must have")
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--attempt", type=int, default=1, help="attempt number of the run")
    parser.add_argument("--index", type=int, default=0, help="which engine")
    parser.add_argument("--rank", type=int, default=0, help="which process of the job")
    parser.add_argument("--host", default="127.0.0.1", help="address an engine binds to")
    parser.add_argument("--port", type=int, default=0, help="port an engine binds to; 0 for any")
    return parser
