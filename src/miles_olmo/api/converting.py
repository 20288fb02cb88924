"""Convert checkpoints from Python: what `miles prepare checkpoint` and `miles export` do, typed.

The work is done by a process of its own (`miles_olmo.jobs.convert`), which needs the train extra; this
one never imports torch.

Example:
    from pathlib import Path
    from miles_olmo.api.converting import convert_checkpoint

    result = convert_checkpoint(Path("OLMoE-1B-7B"), Path("checkpoints/olmoe"))
    print(result.max_abs_difference, "of at most", result.bound)
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles_olmo.api.running import RUNS_DIRECTORY, find_run
from miles_olmo.base.errors import CheckpointError, MilesError, UsageError
from miles_olmo.base.files import held_directory
from miles_olmo.base.lifeline import LIFELINE_VARIABLE, Lifeline
from miles_olmo.base.rundir import RunDirectory

__all__ = ["Conversion", "convert_checkpoint", "export_run"]

SCHEMA = "miles-olmo/conversion/v1"


@dataclass(frozen=True)
class Conversion:
    """A finished conversion."""

    direction: Literal["to-core", "to-hugging-face"]
    source: Path
    destination: Path
    family: str
    dtype: str
    step: int | None
    """Training step of the weights; None for weights of no run."""
    max_abs_difference: float
    """Largest difference of a logit between the two sides, over random tokens."""
    bound: float
    """Above it the conversion would have failed."""
    num_tokens: int
    """Tokens compared."""

    def as_json(self) -> dict[str, Any]:
        """JSON-safe, with the schema's name."""
        paths = {"source": str(self.source), "destination": str(self.destination)}
        return {"schema": SCHEMA, **self.__dict__, **paths}


def convert_checkpoint(
    source: Path, destination: Path, *, dtype: Literal["float32", "bfloat16"] | None = None
) -> Conversion:
    """Convert a Hugging Face directory to a checkpoint for `model.checkpoint`, or the other way.

    Args:
        source: A Hugging Face directory, a converted checkpoint, a run, or a checkpoint inside one.
        destination: A directory that does not exist.
        dtype: Of the converted weights; that of the files when None. Only for a Hugging Face source.

    Raises:
        MilesError: E170-E177 the model is not supported; E440-E448 (and E430-E433 towards Hugging
            Face) the conversion failed, and the destination does not exist.
    """
    options = ["--dtype", dtype] if dtype else []
    return _run(source, destination, options)


def export_run(
    run: str, *, step: int | None = None, out: Path | None = None, runs: Path = RUNS_DIRECTORY
) -> Conversion:
    """Export a checkpoint of a run to Hugging Face, its logits checked.

    Args:
        run: Its id, a unique beginning of it, its directory, or "latest".
        step: Which checkpoint; the newest that was saved completely when None.
        out: A directory that does not exist; `<run>/exports/step-<step>` when None.
        runs: Directory of all runs.

    Raises:
        MilesError: as `convert_checkpoint`; UsageError when there is no such run.
    """
    directory = find_run(run, runs=runs)
    with contextlib.ExitStack() as stack:
        while True:
            chosen = _newest_complete_step(directory) if step is None else step
            destination = out or directory.root / "exports" / f"step-{chosen:06d}"
            refuse_existing(destination)
            options = ["--step", str(chosen)]
            try:
                held = _held_checkpoint(directory.checkpoint(chosen), destination)
                options += ["--checkpoint", str(stack.enter_context(held))]
                break
            except FileNotFoundError:
                if step is not None:  # the job says which ones there are
                    break  # else a living run has removed it, and has newer ones
        return _run(directory.root, destination, options)


@contextlib.contextmanager
def _held_checkpoint(checkpoint: Path, destination: Path) -> Iterator[Path]:
    """The checkpoint's files beside the destination, so that the run cannot remove them meanwhile."""
    target = destination.with_name(f".{destination.name}.{os.getpid()}.{checkpoint.name}")
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(held_directory(checkpoint, target))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CheckpointError(
                "E445",
                f"{target} could not be written: {error.strerror or error}",
                why="the checkpoint is held there while it is exported",
                fix="name a destination with --out in a directory that can be written",
                path=str(target),
            ) from error
        yield held


def _newest_complete_step(run: RunDirectory) -> int:
    for step in reversed(run.checkpoint_steps()):
        if (run.checkpoint(step) / "complete.json").is_file():
            return step
    raise UsageError(
        "E446",
        f"run {run.run_id} has no complete checkpoint",
        why="it has not reached checkpoint.every_steps, or its checkpoints were removed",
        fix="wait for the first checkpoint, or export another run",
    )


def refuse_existing(destination: Path) -> None:
    """Nothing is overwritten.

    Raises:
        UsageError: E443.
    """
    if destination.exists() or destination.is_symlink():
        raise UsageError(
            "E443",
            f"{destination} exists",
            why="what is there might be a checkpoint that is in use",
            fix="name another destination, or remove it",
        )


def _run(source: Path, destination: Path, options: list[str]) -> Conversion:
    """Start the job, wait for it, and return what its last line says."""
    refuse_existing(destination)  # before seconds are spent on starting a process
    arguments = [str(source), str(destination), *options]
    lifeline = Lifeline()
    try:
        process = subprocess.run(
            [sys.executable, "-m", "miles_olmo.jobs.convert", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            pass_fds=[lifeline.child_end],
            env={**os.environ, LIFELINE_VARIABLE: str(lifeline.child_end)},
            check=False,
        )
    finally:
        lifeline.close()
    document = _last_document(process.stdout)
    if document is None:
        output = process.stderr.strip().splitlines()
        raise CheckpointError(
            "E447",
            f"the converting process ended with code {process.returncode} and no result",
            why="its last line is: " + (output[-1] if output else "(no output)"),
            fix="look at its output, install the train extra, or give it more memory",
            output=output[-20:],
        )
    if (error := document.get("error")) is not None:
        raise _as_error(error)
    check = document["logits_check"]
    return Conversion(
        direction=document["direction"],
        source=Path(document["source"]),
        destination=Path(document["destination"]),
        family=document["family"],
        dtype=document["dtype"],
        step=document.get("step"),
        max_abs_difference=check["max_abs_difference"],
        bound=check["bound"],
        num_tokens=check["num_tokens"],
    )


def _as_error(error: dict[str, Any]) -> MilesError:
    return CheckpointError(
        error["code"], error["what"], why=error["why"], fix=error["fix"], **error["details"]
    )


def _last_document(output: str) -> dict[str, Any] | None:
    """The job's own line; libraries print before it."""
    for line in reversed(output.splitlines()):
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict) and document.get("schema") == SCHEMA:
            return document
    return None
