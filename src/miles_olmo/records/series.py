"""All that a report of a run needs, read from its files at once: `read_series`.

It holds only what counts: of a step that several attempts walked, the newest attempt's rows. A run
that is still going, was killed, or lost some of its files gives what is there; what is wrong is in
`status.problems`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles_olmo.base.errors import UsageError
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.records.counters import Counter, counters
from miles_olmo.records.expert_load import ExpertLoad, read_expert_load
from miles_olmo.records.metrics import Metrics, Phase, read_metrics
from miles_olmo.records.receipts import merge_receipts
from miles_olmo.records.samples import Sample, read_samples, sample_steps
from miles_olmo.records.status import RunStatus, read_status


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the steps that have it."""

    steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def last(self) -> float:
        return self.values[-1]


@dataclass(frozen=True, slots=True)
class RunSeries:
    """A run, as curves, counters and facts."""

    status: RunStatus
    metrics: Metrics
    expert_load: tuple[ExpertLoad, ...]
    counters: tuple[Counter, ...]
    samples: tuple[Sample, ...]
    """Answers of the newest step that left some."""
    manifest: Mapping[str, Any]
    """As the plan holds it; empty when the plan is damaged."""
    machine: Mapping[str, Any]
    """Of the newest attempt: python, platform, cpu, cpu_count, packages, git_commit."""
    processes: Mapping[str, int]
    """Role of a job -> processes that the plan gives it."""

    def curve(self, phase: Phase, name: str) -> Curve:
        """One metric of one phase; empty when no step has it."""
        rows = [row for row in self.metrics.of(phase) if name in row.values]
        return Curve(tuple(row.step for row in rows), tuple(row.values[name] for row in rows))


def read_series(directory: Path) -> RunSeries:
    """Read a run.

    Args:
        directory: `runs/<id>`; damage is listed in `status.problems`.
    """
    run = RunDirectory(directory)
    status, metrics = read_status(directory), read_metrics(run.metrics)
    problems = list(status.problems)
    attempts = {row.step: row.attempt for row in metrics.of("train")}
    loads = read_expert_load(run.expert_load, attempts)
    problems += loads.problems
    samples = _newest_samples(run, status.step, problems)
    events = merge_receipts(run.receipts).events
    content = _plan_content(run)
    manifest = content.get("manifest")
    return RunSeries(
        status=replace(status, problems=tuple(problems)),
        metrics=metrics,
        expert_load=loads.rows,
        counters=counters(metrics, events),
        samples=samples,
        manifest=manifest if isinstance(manifest, dict) else {},
        machine=next((e["body"] for e in reversed(events) if e["type"] == "attempt-started"), {}),
        processes=_processes(content),
    )


def _plan_content(run: RunDirectory) -> dict[str, Any]:
    """Damage is no error here: `read_status` has reported it."""
    try:
        content = json.loads(run.plan.read_bytes())["content"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _processes(content: Mapping[str, Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    jobs = content.get("jobs")
    for job in jobs if isinstance(jobs, list) else ():
        if isinstance(job, dict) and isinstance(job.get("processes"), int):
            role = str(job.get("role"))
            found[role] = found.get(role, 0) + job["processes"]
    return found


def _newest_samples(run: RunDirectory, step: int, problems: list[str]) -> tuple[Sample, ...]:
    """Samples of the newest step that counts; a resume leaves files of steps beyond it."""
    steps = [number for number in sample_steps(run.root / "samples") if number <= step]
    if not steps:
        return ()
    try:
        return tuple(read_samples(run.samples(steps[-1])))
    except (UsageError, OSError) as error:
        problems.append(str(error))
        return ()
