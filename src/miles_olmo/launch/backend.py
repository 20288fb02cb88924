"""What a place that runs jobs must be able to do. `local` is the only one yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.launch.commands import JobCommand
from miles_olmo.records.status import Outcome, RunStatus

if TYPE_CHECKING:  # a plan brings pydantic, and reading a run's files needs neither
    from miles_olmo.plan.model import RunPlan

LAUNCH_SCHEMA = "miles-olmo/launch/v1"


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What a person asks for with `miles launch`."""

    plan: RunPlan | None
    """None only when resuming: the run's own plan again."""
    runs: Path
    """Directory of all runs."""
    name: str | None = None
    """The run id itself, instead of name + digest + number."""
    resume: str | None = None
    """A run to continue: id, unique prefix, path or "latest"."""
    accept_changes: bool = False
    """Continue although the plan differs where a resume allows it."""
    detach: bool = False
    """Return once the run is up; it goes on in the background."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """How a launch ended, or, detached, how it came up."""

    run_id: str
    directory: str
    attempt: int
    outcome: Outcome
    """running only for a detached run that is up."""
    exit_code: int
    error: dict[str, Any] | None = None
    """{job, code, what, why, fix, details} of a run that failed."""
    last_lines: tuple[str, ...] = ()
    """The end of the failing job's log."""

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": LAUNCH_SCHEMA,
            "run_id": self.run_id,
            "directory": self.directory,
            "attempt": self.attempt,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "error": self.error,
            "last_lines": list(self.last_lines),
        }


class ProgressView(Protocol):
    """Shows a run while it is watched."""

    def update(self) -> None:
        """Called often; decides itself whether there is something to show."""

    def close(self) -> None:
        """Show the end and give the terminal back."""


class Backend(Protocol):
    """Where jobs run."""

    name: str

    def render(self, plan: RunPlan, run: RunDirectory, attempt: int) -> list[JobCommand]:
        """What would be executed; starts nothing."""
        ...

    def submit(self, request: LaunchRequest, view: ViewFactory | None = None) -> LaunchResult:
        """Start a run, or a new attempt of one, and follow it unless detached."""
        ...

    def status(self, run: RunDirectory) -> RunStatus:
        """The state of a run."""
        ...

    def cancel(self, run: RunDirectory) -> RunStatus:
        """End a run; returns its state once nothing of it is left."""
        ...

    def logs(self, run: RunDirectory, attempt: int | None = None) -> dict[str, Path]:
        """Log files of an attempt (the newest when None) by job name."""
        ...


class ViewFactory(Protocol):
    """Makes the view of a run once its directory is known."""

    def __call__(self, run: RunDirectory, plan: RunPlan) -> ProgressView: ...
