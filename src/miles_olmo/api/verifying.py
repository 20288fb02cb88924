"""Verify a run's checkpoint from Python: what `miles verify` does."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from miles_olmo.api.running import RUNS_DIRECTORY, find_run
from miles_olmo.base.errors import UsageError
from miles_olmo.launch.verification import (
    VerificationResult,
    checkpoint_target,
    verify_checkpoint_of,
)

__all__ = ["VerificationResult", "verify"]


def verify(
    target: str | Path,
    *,
    step: int | None = None,
    engine: Literal["core", "vllm"] | None = None,
    runs: Path = RUNS_DIRECTORY,
) -> VerificationResult:
    """Compare trainer and engine on a checkpoint: logprobs, routes and weights.

    Args:
        target: A run (id, beginning of an id, directory, "latest") or a checkpoint's directory.
        step: Which checkpoint of the run; the newest when None.
        engine: Kind of engine; the run's own when None.

    Raises:
        UsageError: E501, there is no such run; E509, `step` contradicts the checkpoint named.
        VerificationError: E371, there is no such checkpoint.
        LaunchError, PlanError: this machine or the run's inputs do not allow it.
        KeyboardInterrupt: it was interrupted before there was a result; nothing is left of it.
    """
    checkpoint = checkpoint_target(Path(target))
    if checkpoint is None:
        return verify_checkpoint_of(find_run(target, runs=runs), step, engine=engine)
    run, own_step = checkpoint
    if step not in (None, own_step):
        raise UsageError(
            "E509",
            f"--step {step} with the checkpoint of step {own_step}",
            why="a checkpoint's directory is of one step",
            fix="leave --step out, or name the run",
        )
    return verify_checkpoint_of(run, own_step, engine=engine)
