"""Run a plan from Python: what `miles launch`, `status`, `samples`, `logs` and `cancel` do, typed.

    from pathlib import Path
    from miles_olmo.api.planning import make_plan
    from miles_olmo.api.running import read_status, submit

    result = submit(make_plan(Path("manifests/quickstart.toml")), detach=True)
    print(read_status(result.run_id).step)

A run is named by its id, a unique beginning of it, its directory, or "latest".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from miles_olmo.base.errors import UsageError
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.backend import LaunchRequest, LaunchResult, ViewFactory
from miles_olmo.records import runs as run_files
from miles_olmo.records import samples as sample_files
from miles_olmo.records import status as status_files
from miles_olmo.records.runs import RUNS_DIRECTORY, run_reference
from miles_olmo.records.samples import Sample
from miles_olmo.records.status import RunStatus

if TYPE_CHECKING:  # planning and launching are imported where they happen: status starts fast
    from miles_olmo.plan.model import RunPlan

__all__ = [
    "RUNS_DIRECTORY",
    "LaunchResult",
    "RunStatus",
    "Sample",
    "cancel",
    "find_run",
    "list_runs",
    "load_plan",
    "log_files",
    "read_samples",
    "read_status",
    "run_reference",
    "submit",
]


def load_plan(path: Path, *, overrides: Sequence[str] = ()) -> RunPlan:
    """A plan from either file: a plan (`.json`) is read, a manifest (anything else) is planned.

    Raises:
        ManifestErrors: everything that is wrong with a manifest.
        PlanError: E140, E141 of a plan file.
        UsageError: E602 an override is no assignment; E506 overrides of a finished plan.
    """
    from miles_olmo.api.planning import make_plan, read_plan

    if path.suffix != ".json":
        return make_plan(path, overrides=overrides)
    if overrides:
        raise UsageError(
            "E506",
            f"--set cannot change the plan {path}",
            why="a plan is immutable; its digest covers every value",
            fix="name the manifest instead",
        )
    return read_plan(path)


def submit(
    plan: RunPlan | None,
    *,
    runs: Path | None = None,
    name: str | None = None,
    resume: str | None = None,
    accept_changes: bool = False,
    detach: bool = False,
    view: ViewFactory | None = None,
) -> LaunchResult:
    """Start a run and follow it to its end; detached, until it is up.

    A run that fails is no exception: see `outcome`, `error` and `exit_code` of the result. Called
    in the main thread, an interrupt ends the run and everything it started.

    Args:
        plan: What to run. May be None with `resume`: the run's own plan goes on.
        runs: Directory of all runs; `launch.runs_directory` of the plan when None.
        name: The run id itself, instead of name + digest + number.
        resume: A run to continue with a new attempt.
        accept_changes: Continue although the plan differs where a resume allows it.
        view: Makes the progress view, such as `miles_olmo.launch.progress.Progress`.

    Raises:
        LaunchError: E500 to E508; nothing was started and nothing written.
        PlanError: E142 to E145; the same.
        UsageError: E501, there is no such run to resume.
    """
    from miles_olmo.launch.local import LocalBackend

    if plan is None and resume is None:
        raise UsageError(
            "E509",
            "there is nothing to launch",
            why="a new run needs a manifest or a plan",
            fix="name one, or continue a run with --resume RUN",
        )
    if name is not None and resume is not None:
        raise UsageError(
            "E509",
            "--name and --resume exclude each other",
            why="a resumed run keeps its id",
            fix="leave one of them out",
        )
    if runs is None:
        runs = Path(plan.manifest.launch.runs_directory) if plan else RUNS_DIRECTORY
    request = LaunchRequest(plan, runs, name, resume, accept_changes, detach)
    return LocalBackend().submit(request, view)


def find_run(run: str | Path, *, runs: Path = RUNS_DIRECTORY) -> RunDirectory:
    """The directory of a run.

    Raises:
        UsageError: E501, there is none, or the text fits several.
    """
    return run_files.resolve_run(str(run), runs)


def read_status(
    run: str | Path, *, runs: Path = RUNS_DIRECTORY, every_record: bool = False
) -> RunStatus:
    """The state of a run, from its files: while it runs, after it ended, after a crash.

    Args:
        every_record: List damage of the samples and the load of experts, too.

    Raises:
        UsageError: E501.
    """
    directory = find_run(run, runs=runs).root
    return status_files.read_status(directory, every_record=every_record)


def list_runs(runs: Path = RUNS_DIRECTORY) -> list[RunStatus]:
    """The state of every run of a directory, oldest first."""
    return status_files.list_runs(runs)


def read_samples(
    run: str | Path, *, step: int | None = None, runs: Path = RUNS_DIRECTORY
) -> list[Sample]:
    """The sampled answers of a step, of the newest one when `step` is None.

    Raises:
        UsageError: E501; E519, there are none of that step; E533, the file is damaged.
    """
    directory = find_run(run, runs=runs)
    steps = sample_files.sample_steps(directory.root / "samples")
    chosen = steps[-1] if step is None and steps else step
    if chosen is None or chosen not in steps:
        shown = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
        raise UsageError(
            "E519",
            f"the run {directory.run_id} has no samples"
            + (f" of step {step}" if step is not None else ""),
            why=f"it holds samples of {shown}",
            fix="name one of those with --step" if steps else "wait for the first training step",
            steps=steps,
        )
    return sample_files.read_samples(directory.samples(chosen))


def log_files(
    run: str | Path, *, attempt: int | None = None, runs: Path = RUNS_DIRECTORY
) -> dict[str, Path]:
    """Log files by job name, of the newest attempt when `attempt` is None.

    Raises:
        UsageError: E501; E519, there is no log of that attempt.
    """
    directory = find_run(run, runs=runs)
    files = run_files.log_files(directory, attempt)
    if not files:
        raise UsageError(
            "E519",
            f"the run {directory.run_id} has no logs"
            + (f" of attempt {attempt}" if attempt is not None else ""),
            why="no job was started then",
            fix=f"see its attempts: miles status {run_reference(directory.root)}",
        )
    return files


def cancel(run: str | Path, *, runs: Path = RUNS_DIRECTORY) -> RunStatus:
    """End a run and wait until nothing of it is left; one that is over stays as it is.

    Raises:
        UsageError: E501.
        LaunchError: E516, it is supervised on another machine; E517, it does not end.
    """
    from miles_olmo.launch.local import LocalBackend

    return LocalBackend().cancel(find_run(run, runs=runs))
