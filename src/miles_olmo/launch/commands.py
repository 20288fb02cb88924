"""What is executed for each job of a plan: arguments, never a shell string, and the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from miles_olmo.base.lifeline import LIFELINE_VARIABLE
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.gpus import VISIBLE_GPUS_VARIABLE, usable_gpus
from miles_olmo.wire.protocol import RANK_SUFFIX, TOKEN_VARIABLE

if TYPE_CHECKING:
    from miles_olmo.plan.model import JobSpec, RunPlan

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


@dataclass(frozen=True, slots=True)
class JobCommand:
    """One process to start."""

    name: str
    """Unique in the run; also names the log file and the job's receipts."""
    role: Literal["prepare", "trainer", "engine"]
    argv: tuple[str, ...]
    threads: int
    """CPU threads of the process."""
    index: int = 0
    """Number among the engines."""
    port: int = 0
    """Port of an engine; 0 lets it choose a free one."""
    restartable: bool = False
    """May be started again when it dies."""
    gpu: int | None = None
    """GPU of the process, counted among those that the launch may use; None on a CPU."""


def render_jobs(plan: RunPlan, run: RunDirectory, attempt: int) -> list[JobCommand]:
    """Every process of a plan as a command, in the plan's order; ranks of a job one after another."""
    commands, engines = [], 0
    for job in plan.content.jobs:
        extra: tuple[str, ...] = ()
        index = port = 0
        if job.role == "engine":
            index, engines = engines, engines + 1
            port = engine_port(plan, index)
            host = plan.manifest.launch.host
            extra = ("--index", str(index), "--host", host, "--port", str(port))
        argv = (*_base_arguments(job, plan, run, attempt), *extra)
        for rank in range(job.processes):
            name = f"{job.name}{RANK_SUFFIX}{rank}" if rank else job.name
            own = ("--rank", str(rank)) if rank else ()
            gpu = job.gpus[rank] if job.gpus else None
            commands.append(
                JobCommand(
                    *(name, job.role, (*argv, *own), job.threads, index, port, job.restartable, gpu)
                )
            )
    return commands


def engine_port(plan: RunPlan, index: int) -> int:
    """Port of engine `index`; 0 (any free port) unless the manifest fixes a base port."""
    base = plan.manifest.engines.base_port
    return base + index if base else 0


def job_environment(command: JobCommand, token: Path, lifeline: int) -> dict[str, str]:
    """The launcher's environment plus what a job needs; it is handed over, never written down."""
    return {
        **os.environ,
        **{name: str(command.threads) for name in _THREAD_VARIABLES},
        "PYTHONUNBUFFERED": "1",  # logs are whole when a process is killed
        "PYTHONSAFEPATH": "1",  # files in the working directory shadow no module
        TOKEN_VARIABLE: str(token),
        LIFELINE_VARIABLE: str(lifeline),
        **_gpu_environment(command),
    }


def _gpu_environment(command: JobCommand) -> dict[str, str]:
    if command.gpu is None:
        return {}
    usable = usable_gpus()
    return {
        # Without a list of the user's the number itself is the GPU's.
        VISIBLE_GPUS_VARIABLE: str(command.gpu) if usable is None else usable[command.gpu],
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # equal sums in every run of the trainer
    }


def _base_arguments(
    job: JobSpec, plan: RunPlan, run: RunDirectory, attempt: int
) -> tuple[str, ...]:
    return (
        *(sys.executable, "-m", job.module),
        *("--plan", str(run.plan), "--digest", plan.digest),
        *("--run", str(run.root), "--attempt", str(attempt)),
    )
