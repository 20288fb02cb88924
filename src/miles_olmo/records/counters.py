"""Everything of a run that was dropped, retried, refilled, skipped or restarted, with its count.

Metrics that count per step are added over the steps that count. Metrics that count on are read at their
highest in each attempt, less what the attempt started from, and added over the attempts, also where a
later attempt walked the steps again: it did happen. Events are counted in the receipts.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_olmo.records.catalogue import CATALOGUE, Metric
from miles_olmo.records.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Counter:
    """One kind of trouble."""

    name: str
    """Metric, or type of receipt."""
    meaning: str
    count: int
    unit: str
    is_recorded: bool = True
    """False: the run has no figure for it, which is not the same as 0."""


# Type of receipt -> what one of them means.
_EVENTS = {
    "engine-restarted": "Engines started again after they died.",
    "engine-hung": "Engines killed because they answered no health check.",
    "job-failed": "Jobs that ended with an error.",
    "checkpoint-skipped": "Checkpoints that a resume found damaged and left out.",
    "resumed": "Attempts that went on from a checkpoint.",
    "changes-accepted": "Resumes with changed settings.",
    "experts-collapsed": "Collapse alarms raised.",
    "tracker-fault": "Trackers (TensorBoard, W&B) with a fault.",
}


def counters(metrics: Metrics, events: Sequence[dict[str, Any]]) -> tuple[Counter, ...]:
    """All counters of a run.

    Args:
        events: Receipts of all writers.
    """
    before = {
        event["body"].get("attempt"): found
        for event in events
        if event["type"] == "resumed" and isinstance(found := event["body"].get("counters"), dict)
    }
    from_metrics = [
        _of_metric(metric, metrics, before) for metric in CATALOGUE.values() if metric.is_trouble
    ]
    tally = Tally(event["type"] for event in events)
    from_receipts = [
        Counter(kind, meaning, tally[kind], "events") for kind, meaning in _EVENTS.items()
    ]
    return (*from_metrics, *from_receipts, *_of_bodies(events))


def _of_metric(
    metric: Metric, metrics: Metrics, before: Mapping[Any, Mapping[str, float]]
) -> Counter:
    """`before`: attempt -> counters that it started from."""
    if metric.counts == "step":
        values = [row.values[metric.name] for row in metrics.rows if metric.name in row.values]
        return Counter(metric.name, metric.meaning, int(sum(values)), metric.unit, bool(values))
    highest: dict[int, float] = {}
    for row in (*metrics.rows, *metrics.superseded):
        if metric.name in row.values:
            highest[row.attempt] = max(highest.get(row.attempt, 0), row.values[metric.name])
    counts = (
        value - (before.get(attempt, {}).get(metric.name, 0) if metric.counts == "run" else 0)
        for attempt, value in highest.items()
    )
    total = int(sum(counts))
    return Counter(metric.name, metric.meaning, total, metric.unit, bool(highest))


def _of_bodies(events: Iterable[dict[str, Any]]) -> tuple[Counter, ...]:
    """Counts that stand inside receipts."""
    last: dict[str, dict[str, Any]] = {event["type"]: event["body"] for event in events}
    long, back = (
        last.get(kind, {}).get(key)
        for kind, key in (
            ("prompts-read", "over_max_prompt_tokens"),
            ("warmup-finished", "steps_back"),
        )
    )
    return (
        Counter(
            "over_max_prompt_tokens",
            "Training prompts left out because they are longer than max_prompt_tokens.",
            *_count(long, "prompts"),
        ),
        Counter(
            "steps_back",
            "Overshoots that the warm-up took back.",
            *_count(back, "overshoots"),
        ),
    )


def _count(value: Any, unit: str) -> tuple[int, str, bool]:
    return (value, unit, True) if isinstance(value, int) else (0, unit, False)
