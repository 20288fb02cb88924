"""Device, CPU threads and determinism of a process that computes with torch."""

from __future__ import annotations

import torch

from miles_olmo.base.errors import TrainingError
from miles_olmo.jobs.entry import JobContext


def threads_of(context: JobContext) -> int:
    """CPU threads that the plan gives this job."""
    return next(job.threads for job in context.plan.content.jobs if job.name == context.job)


def device_of(context: JobContext) -> torch.device:
    """The device that the plan gives trainer and engines.

    Raises:
        TrainingError: E302, the plan says GPU and torch sees none.
    """
    if context.plan.manifest.launch.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise TrainingError(
            "E302",
            f"torch {torch.__version__} sees no GPU",
            why="the plan has launch.device = 'cuda'; torch may be a build for CPUs, or newer than "
            "the driver",
            fix="run `miles doctor`; install a CUDA build of torch that fits the driver",
        )
    return torch.device("cuda", 0)  # the launcher shows each process one


def configure_torch(threads: int) -> None:
    """Fix the number of threads, and refuse operations that differ from run to run."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
    # Operations that read memory they did not write are refused where torch knows them; filling all new
    # memory with NaN first, torch's default beside that mode, writes every activation twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
