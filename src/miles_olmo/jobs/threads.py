"""CPU threads and determinism of a process that computes with torch."""

from __future__ import annotations

import torch

from miles_olmo.jobs.entry import JobContext


def threads_of(context: JobContext) -> int:
    """CPU threads that the plan gives this job."""
    return next(job.threads for job in context.plan.content.jobs if job.name == context.job)


def configure_torch(threads: int) -> None:
    """Fix the number of threads, and refuse operations that differ from run to run."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
    # Operations that read memory they did not write are refused where torch knows them; filling all new
    # memory with NaN first, torch's default beside that mode, writes every activation twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
