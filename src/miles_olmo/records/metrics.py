"""Metrics: one JSON line per step in `metrics.jsonl`, readable while the run writes it.

    {"phase": "train", "step": 12, "attempt": 1, "at": "...", "values": {"rollout/reward": 0.41}}

Step s of phase "evaluation" is the evaluation after training step s (0: before the first).
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from miles_olmo.base.errors import TrainingError
from miles_olmo.records.lines import LineLog
from miles_olmo.records.receipts import utc_now

Phase = Literal["warmup", "train", "evaluation"]


@dataclass(frozen=True, slots=True)
class MetricRow:
    """What was measured in one step."""

    phase: Phase
    step: int
    attempt: int
    """Attempt of the run that wrote the row, from 1."""
    at: str
    """UTC, ISO 8601."""
    values: dict[str, float]
    """Metric name, such as "train/loss" -> finite number."""

    @property
    def position(self) -> tuple[int, int, int]:
        """Order in the life of a run: warm-up, then each step followed by its evaluation."""
        return (int(self.phase != "warmup"), self.step, int(self.phase == "evaluation"))


@dataclass(frozen=True, slots=True)
class Metrics:
    """The rows that count, in the order of the run's life."""

    rows: tuple[MetricRow, ...]
    problems: tuple[str, ...]
    """Lines that could not be read, with file and line; a torn last line is none."""
    superseded: tuple[MetricRow, ...] = ()
    """Rows that a later attempt walked again; only counts of what happened need them."""

    def of(self, phase: Phase) -> tuple[MetricRow, ...]:
        """Rows of one phase, by step."""
        return tuple(row for row in self.rows if row.phase == phase)

    def latest(self, phase: Phase) -> MetricRow | None:
        """The last row of one phase."""
        rows = self.of(phase)
        return rows[-1] if rows else None


class MetricsLog(LineLog):
    """Appends rows to `metrics.jsonl`."""

    def append(self, phase: Phase, step: int, attempt: int, values: Mapping[str, float]) -> None:
        """Add one row.

        Raises:
            TrainingError: E532, a value is NaN, infinite or no number. Nothing is written.
        """
        if phase not in get_args(Phase):
            raise ValueError(f"unknown phase {phase!r}")
        numbers = {name: _finite(name, value, phase, step) for name, value in values.items()}
        self.append_line(
            {"phase": phase, "step": step, "attempt": attempt, "at": utc_now(), "values": numbers}
        )


def read_metrics(path: Path) -> Metrics:
    """Read `metrics.jsonl`; an absent file holds no rows.

    A run that was resumed has walked part of its way twice. The newest attempt is the truth: rows
    of an older attempt at or after the place where a newer one began are left out.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return Metrics((), ())
    except OSError as error:
        return Metrics((), (f"{path}: {error.strerror or error}",))
    rows: list[MetricRow] = []
    problems: list[str] = []
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        row = _parse(line)
        if row is None:
            problems.append(f"{path}:{number}: not a metrics row")
        else:
            rows.append(row)
    kept = _newest(rows)
    counted = set(map(id, kept))
    superseded = tuple(row for row in rows if id(row) not in counted)
    return Metrics(tuple(kept), tuple(problems), superseded)


def _newest(rows: list[MetricRow]) -> list[MetricRow]:
    by_attempt: dict[int, list[MetricRow]] = {}
    for row in rows:
        by_attempt.setdefault(row.attempt, []).append(row)
    kept: dict[tuple[int, int, int], MetricRow] = {}
    for attempt in sorted(by_attempt):
        start = min(row.position for row in by_attempt[attempt])
        kept = {position: row for position, row in kept.items() if position < start}
        kept.update({row.position: row for row in by_attempt[attempt]})
    return [kept[position] for position in sorted(kept)]


def _parse(line: bytes) -> MetricRow | None:
    try:
        value: Any = json.loads(line)
        row = MetricRow(
            value["phase"], value["step"], value["attempt"], value["at"], value["values"]
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_row = row.phase in get_args(Phase) and type(row.step) is int and type(row.attempt) is int
    return row if is_row and isinstance(row.at, str) and _are_numbers(row.values) else None


def _are_numbers(values: Any) -> bool:
    if not isinstance(values, dict):
        return False
    try:
        return all(type(v) in (int, float) and math.isfinite(v) for v in values.values())
    except OverflowError:  # an integer that no float holds
        return False


def _finite(name: str, value: Any, phase: str, step: int) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if is_number and math.isfinite(value):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise TrainingError(
        "E532",
        f"metric {name} of {phase} step {step} is {value!r}",
        why="metrics are finite numbers, so that curves and comparisons of runs mean something",
        fix="leave the metric out of a step that has no value for it",
        metric=name,
        phase=phase,
        step=step,
    )
