"""The figures at the top of a report and the facts at its end, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean, median

from miles_olmo.records.metrics import Phase
from miles_olmo.records.series import Curve, RunSeries

NONE = "–"
_LAST_STEPS = 10


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure, of each run."""

    label: str
    values: tuple[str, ...]
    hint: str


def tiles(runs: Sequence[RunSeries]) -> list[Tile]:
    """The figures that say how a run went; those that no run has are left out."""
    found = [
        _tile(runs, "Reward", f"mean of last {_LAST_STEPS} steps", "train", "rollout/reward",
              lambda c: f"{fmean(c.values[-_LAST_STEPS:]):.3f}"),
        _tile(runs, "Accuracy", "held out, first → last", "evaluation", "eval/accuracy",
              lambda c: f"{c.values[0]:.2f} → {c.last:.2f}"),
        _tile(runs, "Logprob mismatch", "largest, in nats", "train",
              "train/train_rollout_logprob_abs_diff_max", lambda c: f"{max(c.values):.2g}"),
        _tile(runs, "Replay coverage", "lowest of any step", "train", "router/replay_coverage",
              lambda c: f"{min(c.values):.3f}"),
        _tile(runs, "Throughput", "tokens/s, median step", "train",
              "perf/tokens_per_sec", lambda c: f"{median(c.values):,.0f}"),
        _tile(runs, "Step time", "seconds, median step", "train", "perf/step_time",
              lambda c: f"{median(c.values):.2f}"),
        _tile(runs, "Collapsed experts", "at the last step", "train",
              "router/collapsed_experts", lambda c: f"{c.last:g}"),
    ]  # fmt: skip
    return [tile for tile in found if any(value != NONE for value in tile.values)]


def _tile(
    runs: Sequence[RunSeries],
    label: str,
    hint: str,
    phase: Phase,
    metric: str,
    figure: Callable[[Curve], str],
) -> Tile:
    curves = [series.curve(phase, metric) for series in runs]
    return Tile(label, tuple(figure(curve) if curve else NONE for curve in curves), hint)


def facts(series: RunSeries) -> dict[str, str]:
    """Label -> text, the same labels for every run."""
    status, machine = series.status, series.machine
    packages = machine.get("packages")
    model = series.manifest.get("model")
    family = model.get("family") if isinstance(model, dict) else None
    return {
        "run": status.run_id,
        "manifest": status.name or NONE,
        "plan digest": status.plan_digest or NONE,
        "state": f"{status.outcome} since {_moment(status.since)}",
        "attempts": "; ".join(map(_attempt, status.attempts)) or NONE,
        "steps": f"{status.step} of {status.total_steps}, {status.skipped_steps} skipped",
        "model family": str(family or NONE),
        "processes": ", ".join(f"{n} {role}" for role, n in series.processes.items()) or NONE,
        "checkpoints": ", ".join(f"step {step}" for step in status.checkpoints) or NONE,
        "export": "yes" if status.exported else "no",
        "machine": f"{machine.get('cpu', NONE)}, {machine.get('cpu_count', NONE)} threads, "
        f"{machine.get('platform', NONE)}",
        "python": str(machine.get("python", NONE)),
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items())
        if isinstance(packages, dict)
        else NONE,
        "git commit": str(machine.get("git_commit") or NONE),
    }


def _attempt(attempt) -> str:
    duration = ""
    if attempt.ended_at:
        seconds = (_parse(attempt.ended_at) - _parse(attempt.started_at)).total_seconds()
        duration = f" after {seconds:,.0f} s"
    return f"{attempt.number}: {_moment(attempt.started_at)}, {attempt.outcome}{duration}"


def _moment(moment: str) -> str:
    return f"{_parse(moment):%Y-%m-%d %H:%M:%S} UTC" if moment else NONE


def _parse(moment: str) -> datetime:
    return datetime.fromisoformat(moment.replace("Z", "+00:00"))
