"""The figures of a run that a person looks at, from its status: one source for every view."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from miles_olmo.records.status import RunStatus

# label -> (phase, metric names; the first that was recorded counts, format)
_FIGURES: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("warm-up accuracy", "warmup", ("eval/accuracy",), ".3f"),
    ("reward", "train", ("rollout/reward",), ".3f"),
    ("accuracy", "evaluation", ("eval/accuracy",), ".3f"),
    ("loss", "train", ("train/loss",), ".4g"),
    ("tokens/s", "train", ("perf/tokens_per_sec",), ",.0f"),
    (
        "mismatch",
        "train",
        ("train/train_rollout_logprob_abs_diff_max", "train/train_rollout_logprob_abs_diff"),
        ".3g",
    ),
    ("replay coverage", "train", ("router/replay_coverage",), ".3f"),
)


def figures(status: RunStatus) -> dict[str, str]:
    """Label -> figure: the last known value of every metric that was recorded, in reading order."""
    found = {}
    for label, phase, names, form in _FIGURES:
        for name in names:
            value = _last_value(status, phase, name)
            if value is not None:
                found[label] = format(value, form)
                break
    return found


def curve(status: RunStatus, phase: str, name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric, over the steps that have it."""
    rows = (row for row in status.history if row.phase == phase and name in row.values)
    return [(row.step, row.values[name]) for row in rows]


def _last_value(status: RunStatus, phase: str, name: str) -> float | None:
    """Not every step has every metric: accuracy in the warm-up is measured now and then."""
    rows = reversed(status.history)
    return next((r.values[name] for r in rows if r.phase == phase and name in r.values), None)


def progress_text(status: RunStatus) -> str:
    """Where the run is: "train 12/300", "warm-up step 40"."""
    if status.phase == "train":
        return f"train {status.step}/{status.total_steps}"
    if status.phase == "warmup":
        return f"warm-up step {status.latest['warmup'].step}"
    return {"prepare": "preparing data", "starting": "starting"}[status.phase]


def outcome_text(status: RunStatus) -> str:
    """How the run stands, with what a plain word would hide: "finished, every step skipped"."""
    text: str = "a copy, not running" if status.copied_from else status.outcome
    num_steps = sum(row.phase == "train" for row in status.history)
    if num_steps and status.skipped_steps == num_steps:
        text += ", every step skipped"
    return f"{text}, records damaged" if status.problems else text


def engines_text(status: RunStatus) -> str:
    """Engines that are up, of those that were started: "2/2"."""
    started = [job for job in status.jobs if job.name.startswith("engine")]
    return f"{sum(engine.alive for engine in status.engines)}/{len(started)}"


def seconds_since(moment: str, until: str | None = None) -> float:
    """Seconds between two UTC times; until now when there is no second one."""
    end = _parse(until) if until else datetime.now(UTC)
    return max(0.0, (end - _parse(moment)).total_seconds()) if moment else 0.0


def attempt_seconds(status: RunStatus) -> float:
    """How long the current attempt has run, or ran."""
    if not status.attempts:
        return 0.0
    last = status.attempts[-1]
    until = last.ended_at if status.outcome != "crashed" else status.since
    return seconds_since(last.started_at, until)


def duration(seconds: float) -> str:
    """ "42 s", "3 min 5 s", "2 h 10 min", "3 d 4 h"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text, lowest to highest value; averaged down to `width` characters."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(part) / len(part) for part in _parts(values, size)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in means)


def _parts(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def _parse(moment: str) -> datetime:
    return datetime.fromisoformat(moment.replace("Z", "+00:00"))
