"""The state of a run, read from its files alone: while it runs, after it ended, after a crash.

No process is asked. Whether the run still lives is decided by the identity of its supervisor (pid
and start time) in `control.json`; on another machine, by how fresh that file is. The file names the
directory it was written in, so that a copy of a run is not taken for the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from miles_olmo.base.processes import ProcessIdentity
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.records.expert_load import read_expert_load
from miles_olmo.records.metrics import MetricRow, Metrics, read_metrics
from miles_olmo.records.receipts import merge_receipts
from miles_olmo.records.samples import sample_problems

STATUS_SCHEMA = "miles-olmo/status/v1"
LAUNCHER = "launcher"
"""Writer of the supervisor's receipts."""
TRAINER = "trainer"
"""Writer of the trainer's receipts."""

HEARTBEAT_SECONDS = 5.0
"""How often a supervisor touches `control.json`."""

Outcome = Literal["running", "finished", "failed", "crashed", "cancelled"]
_ENDINGS: dict[str, Outcome] = {
    "run-finished": "finished",
    "run-failed": "failed",
    "run-cancelled": "cancelled",
}


@dataclass(frozen=True, slots=True)
class AttemptStatus:
    """One start of the run."""

    number: int
    started_at: str
    ended_at: str | None
    """None while it runs and after a crash."""
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class JobStatus:
    """One process of the current attempt."""

    name: str
    pid: int
    alive: bool
    started_at: str
    exit_code: int | None
    """Negative: the signal that ended it. None while it runs and when nobody was left to see."""
    restarts: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A rollout server that announced itself in `engines/`."""

    index: int
    url: str
    pid: int
    attempt: int
    alive: bool


@dataclass(frozen=True, slots=True)
class RunStatus:
    """What `miles status RUN` shows."""

    run_id: str
    directory: str
    name: str
    plan_digest: str
    outcome: Outcome
    """crashed: the supervisor is gone and wrote no ending."""
    since: str
    """When the outcome began; for a crash, the last sign of life. UTC, ISO 8601."""
    phase: Literal["starting", "prepare", "warmup", "train"]
    """Where the current attempt is, or was when it ended."""
    step: int
    """Last training step that counts; 0 before the first."""
    total_steps: int
    skipped_steps: int
    """Training steps that trained nothing, because no group carried signal."""
    attempt: int
    attempts: tuple[AttemptStatus, ...]
    latest: dict[str, MetricRow] = field(default_factory=dict)
    """Last row of each phase that has one."""
    history: tuple[MetricRow, ...] = field(default=(), repr=False)
    """Every row that counts, in the order of the run's life."""
    evaluations: tuple[MetricRow, ...] = ()
    checkpoints: tuple[int, ...] = ()
    """Steps of complete checkpoints."""
    exported: bool = False
    jobs: tuple[JobStatus, ...] = ()
    engines: tuple[EngineStatus, ...] = ()
    error: dict[str, Any] | None = None
    """The error of a failed or crashed run: {job, code, what, why, fix, details}."""
    copied_from: str | None = None
    """Set for a copy that was taken of a run's directory while the run was going: where that was.
    Nothing works on the copy, whatever becomes of the run."""
    problems: tuple[str, ...] = ()
    """Records that are damaged or unreadable."""

    def as_json(self) -> dict[str, Any]:
        """JSON-safe, with the schema `miles-olmo/status/v1`."""
        values = asdict(self)
        del values["history"]  # metrics.jsonl has it
        return {"schema": STATUS_SCHEMA, **values}


def read_status(run_directory: Path, *, every_record: bool = False) -> RunStatus:
    """Read the state of one run.

    Args:
        run_directory: `runs/<id>`; need not be complete, damage is listed in `problems`.
        every_record: Look for damage in the samples and the load of experts, too, which the state
            does not need.
    """
    run = RunDirectory(run_directory)
    problems: list[str] = []
    plan = _read_json(run.plan, problems)
    control = _read_json(run.control, problems)
    copied_from = None
    if not is_own_control(run, control):  # its processes work on another directory
        copied_from, control = _written_in(control), {}
    chain = merge_receipts(run.receipts)
    problems += [str(problem) for problem in chain.problems if problem.kind != "missing"]
    metrics = read_metrics(run.metrics)
    problems += [*metrics.problems, *_missing_records(run, metrics)]
    launcher = [event for event in chain.events if event["writer"] == LAUNCHER]
    attempts = _attempts(run, launcher, control)
    content = _section(_section(plan, "content"), "manifest")
    current = attempts[-1] if attempts else None
    outcome = current.outcome if current else _unstarted(run, control)
    train, rows = metrics.latest("train"), metrics.of("train")
    if every_record:
        problems += _damage(run, metrics, outcome)
    number = current.number if current else 0
    return RunStatus(
        run_id=run.run_id,
        directory=str(run_directory.absolute()),
        name=str(content.get("name", "")),
        plan_digest=str(plan.get("digest", "")),
        outcome=outcome,
        since=_since(run, current, outcome),
        phase=_phase(metrics, number, launcher),
        step=train.step if train else 0,
        total_steps=_whole(_section(content, "train").get("steps")),
        skipped_steps=sum(row.values.get("rollout/skipped_step", 0) > 0 for row in rows),
        attempt=number,
        attempts=tuple(attempts),
        latest={p: r for p in ("warmup", "train", "evaluation") if (r := metrics.latest(p))},
        history=metrics.rows,
        evaluations=metrics.of("evaluation"),
        checkpoints=tuple(run.checkpoint_steps()),
        exported=(run.export / "config.json").exists(),
        jobs=_jobs(control, launcher, number),
        engines=_engines(run, control, number),
        error=_error(chain.events, number) if outcome in ("failed", "crashed") else None,
        copied_from=copied_from if outcome == "crashed" else None,
        problems=tuple(problems),
    )


def list_runs(runs_directory: Path) -> list[RunStatus]:
    """The state of every run in a directory, oldest first. An absent directory holds none."""
    if not runs_directory.is_dir():
        return []
    runs = [path for path in runs_directory.iterdir() if (path / "plan.json").exists()]
    return sorted((read_status(path) for path in runs), key=lambda s: (_started(s), s.run_id))


def supervisor_identity(control: dict[str, Any]) -> ProcessIdentity | None:
    """The supervisor that `control.json` names."""
    return _identity({"process": control.get("supervisor")})


def directory_identity(run: RunDirectory) -> dict[str, Any]:
    """What tells a run's directory from a copy of it; it stays when the directory is renamed."""
    state = run.root.stat()
    return {"path": str(run.root.absolute()), "device": state.st_dev, "inode": state.st_ino}


def is_own_control(run: RunDirectory, control: dict[str, Any]) -> bool:
    """Whether `control.json` was written in this very directory, and not copied with it.

    Machines number their devices differently: on another one than the supervisor's, the inode counts.
    """
    written, identity = _section(control, "directory"), supervisor_identity(control)
    keys = ("device", "inode") if identity is not None and identity.is_here else ("inode",)
    try:
        here = directory_identity(run)
    except OSError:
        return False
    return all(written.get(key) == here[key] for key in keys)


def is_supervised(run: RunDirectory, control: dict[str, Any]) -> bool:
    """Whether the supervisor of this very directory lives."""
    identity = supervisor_identity(control)
    if identity is None or not is_own_control(run, control):
        return False
    if identity.is_here:
        return identity.is_alive
    return time.time() - run.control.stat().st_mtime < 6 * HEARTBEAT_SECONDS


def read_control(run: RunDirectory) -> dict[str, Any]:
    """`control.json`; empty when there is none or it is damaged."""
    return _read_json(run.control, [])


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path}: {error}")
        return {}
    return value if isinstance(value, dict) else {}


def _section(value: dict[str, Any], key: str) -> dict[str, Any]:
    """A table of a document that may be damaged; empty when it is none."""
    inner = value.get(key)
    return inner if isinstance(inner, dict) else {}


def _written_in(control: dict[str, Any]) -> str | None:
    path = _section(control, "directory").get("path")
    return path if isinstance(path, str) else None


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _missing_records(run: RunDirectory, metrics: Metrics) -> Iterator[str]:
    """Records that were there once, because what is written after them is."""
    has_trained = bool(
        metrics.rows or run.checkpoint_steps() or any((run.root / "samples").glob("*.jsonl"))
    )
    has_lived = has_trained or any((run.root / "logs").glob("*/*.log"))
    expected = (
        (run.receipt_log(LAUNCHER), has_lived),
        (run.receipt_log(TRAINER), has_trained),
        (run.metrics, has_trained),
    )
    for path, was_written in expected:
        if was_written and not path.exists():
            yield f"{path}: it is missing, and the run wrote it"


def _damage(run: RunDirectory, metrics: Metrics, outcome: Outcome) -> Iterator[str]:
    """Damage of the records that nothing else here reads."""
    attempts = {row.step: row.attempt for row in metrics.of("train")}
    yield from read_expert_load(run.expert_load, attempts).problems
    yield from sample_problems(run.root / "samples")
    for path in (run.metrics, run.expert_load) if outcome == "finished" else ():
        # A process that is killed may leave a part of a line; none was.
        if path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n"):
            yield f"{path}: the last line is incomplete"


def _attempts(
    run: RunDirectory, launcher: Sequence[dict[str, Any]], control: dict[str, Any]
) -> list[AttemptStatus]:
    attempts: list[AttemptStatus] = []
    for event in launcher:
        if event["type"] == "attempt-started":
            number = _whole(event["body"].get("attempt")) or len(attempts) + 1
            attempts.append(AttemptStatus(number, event["at"], None, "crashed"))
        elif event["type"] in _ENDINGS and attempts:
            last = attempts[-1]
            ending = _ENDINGS[event["type"]]
            attempts[-1] = AttemptStatus(last.number, last.started_at, event["at"], ending)
    if attempts and attempts[-1].ended_at is None and is_supervised(run, control):
        last = attempts[-1]
        attempts[-1] = AttemptStatus(last.number, last.started_at, None, "running")
    return attempts


def _unstarted(run: RunDirectory, control: dict[str, Any]) -> Outcome:
    return "running" if is_supervised(run, control) else "crashed"


def _since(run: RunDirectory, attempt: AttemptStatus | None, outcome: Outcome) -> str:
    if attempt and outcome == "running":
        return attempt.started_at
    if attempt and attempt.ended_at:
        return attempt.ended_at
    for path in (run.control, run.plan, run.root):
        if path.exists():
            moment = datetime.fromtimestamp(path.stat().st_mtime, UTC)
            return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return ""


def _phase(
    metrics: Metrics, attempt: int, launcher: Sequence[dict[str, Any]]
) -> Literal["starting", "prepare", "warmup", "train"]:
    phases = {row.phase for row in metrics.rows if row.attempt == attempt}
    if phases & {"train", "evaluation"}:
        return "train"
    if phases:
        return "warmup"
    roles = [
        (event["type"], event["body"].get("role"))
        for event in launcher
        if event["body"].get("attempt") == attempt
    ]
    preparing = ("job-started", "prepare") in roles and ("job-exited", "prepare") not in roles
    return "prepare" if preparing else "starting"


def _jobs(
    control: dict[str, Any], launcher: Sequence[dict[str, Any]], attempt: int
) -> tuple[JobStatus, ...]:
    exits = {
        (event["body"].get("job"), event["body"].get("pid")): event["body"].get("exit_code")
        for event in launcher
        if event["type"] == "job-exited" and event["body"].get("attempt") == attempt
    }
    statuses = []
    for name, job in _section(control, "jobs").items():
        identity = _identity(job)
        if identity is None:
            continue
        exit_code = exits.get((name, identity.pid))
        statuses.append(
            JobStatus(
                name=name,
                pid=identity.pid,
                alive=exit_code is None and identity.is_alive,
                started_at=str(job.get("started_at", "")),
                exit_code=exit_code,
                restarts=_whole(job.get("restarts")),
            )
        )
    return tuple(statuses)


def _identity(job: Any) -> ProcessIdentity | None:
    """The process of one job of `control.json`."""
    try:
        return ProcessIdentity.from_json(job["process"])
    except (KeyError, TypeError, ValueError):
        return None


def _engines(run: RunDirectory, control: dict[str, Any], attempt: int) -> tuple[EngineStatus, ...]:
    engines = []
    for path in sorted((run.root / "engines").glob("engine-*.json")):
        entry = _read_json(path, [])
        if entry.get("attempt") != attempt:
            continue
        identity = _identity(_section(control, "jobs").get(path.stem))
        alive = identity is not None and identity.is_alive
        pid, url = _whole(entry.get("pid")), str(entry.get("url", ""))
        index = entry.get("index")
        number = index if isinstance(index, int) else -1
        engines.append(EngineStatus(number, url, pid, attempt, alive))
    return tuple(sorted(engines, key=lambda engine: engine.index))


_SECONDARY = "E300"
"""A trainer process that lost another one: the other's own error says more."""


def _error(events: Sequence[dict[str, Any]], attempt: int) -> dict[str, Any] | None:
    """The launcher's account of the failure; after a crash, what a job itself reported."""
    found = None
    for event in events:
        if event["type"] == "attempt-started":
            found = None
        elif event["type"] == "job-failed" and (found is None or found["code"] == _SECONDARY):
            found = {"job": event["writer"], **event["body"]}
        elif event["type"] == "run-failed":
            found = {"job": event["body"].get("job"), **_section(event["body"], "error")}
    return found


def _started(status: RunStatus) -> str:
    return status.attempts[0].started_at if status.attempts else status.since
