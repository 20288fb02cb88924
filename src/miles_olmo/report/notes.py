"""Why a plot of a run has no data."""

from __future__ import annotations

from miles_olmo.records.metrics import Phase
from miles_olmo.records.series import RunSeries
from miles_olmo.report.plots import LinePlot, LoadPlot, Plot


def has_data(plot: Plot, series: RunSeries) -> bool:
    """Whether there is anything to draw."""
    return bool(series.expert_load if isinstance(plot, LoadPlot) else plot.curves(series))


def why_empty(plot: Plot, series: RunSeries) -> str:
    """One sentence for a plot without data."""
    phase: Phase = plot.lines[0].phase if isinstance(plot, LinePlot) else "train"
    if phase == "warmup":
        return _of_section(series, "warmup", "The manifest has no [warmup].", "The warm-up")
    if phase == "evaluation":
        return _of_section(series, "evaluation", "The manifest has no [evaluation].", "Evaluation")
    rows = series.metrics.of("train")
    if not rows:
        return _not_begun(series, "Training")
    if series.status.skipped_steps == len(rows):
        return "Every step was skipped: no group carried signal, so nothing was trained."
    if isinstance(plot, LoadPlot):
        return "The run left no expert_load.jsonl, or none of its lines is of a step that counts."
    if plot.name == "collapsed" and _alarm_is_off(series):
        return "The manifest has train.collapse_alarm.action = 'off'."
    return "The run did not record it: another version of miles-olmo wrote these metrics."


def _alarm_is_off(series: RunSeries) -> bool:
    train = series.manifest.get("train")
    alarm = train.get("collapse_alarm") if isinstance(train, dict) else None
    return isinstance(alarm, dict) and alarm.get("action") == "off"


def _of_section(series: RunSeries, section: str, absent: str, what: str) -> str:
    if series.manifest and not series.manifest.get(section):
        return absent
    return _not_begun(series, what)


def _not_begun(series: RunSeries, what: str) -> str:
    if series.status.outcome == "running":
        return f"{what} has left no measurement yet."
    return f"{what} left no measurement before the run {_ended(series.status.outcome)}."


def _ended(outcome: str) -> str:
    return f"was {outcome}" if outcome == "cancelled" else outcome
