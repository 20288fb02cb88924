"""What may differ between the plan of a run and the plan it is resumed with.

A difference that decides the shape of the state, the order of the data or the sampling makes the
saved state meaningless: never accepted. Any other (more steps, a bug-fix commit) is shown and
needs `--accept-changes`, which leaves a receipt.
"""

from __future__ import annotations

from typing import Any

from miles_olmo.base.errors import LaunchError
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.plan.model import RunPlan

_STATE = (
    "manifest.model",
    "manifest.data",
    "manifest.seed",
    "manifest.warmup",
    "manifest.rollout",
    "manifest.reward",
    "manifest.train.updates_per_step",
    "manifest.train.parallel",
    "inputs",
)


def state_differences(old: RunPlan, new: RunPlan) -> list[dict[str, Any]]:
    """Differences that forbid a resume: [{key, old, new}]."""
    return [
        difference
        for difference in plan_differences(old, new)
        if any(_is_under(difference["key"], key) for key in _STATE)
    ]


def plan_differences(old: RunPlan, new: RunPlan) -> list[dict[str, Any]]:
    """Every leaf of the two contents that differs: [{key, old, new}], by key."""
    before = _leaves(old.content.model_dump(mode="json"))
    after = _leaves(new.content.model_dump(mode="json"))
    return [
        {"key": key, "old": before.get(key), "new": after.get(key)}
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def check_changes(
    run: RunDirectory, old: RunPlan, new: RunPlan, accept: bool
) -> list[dict[str, Any]]:
    """Refuse a resume whose plan differs too much; return the differences that were accepted.

    Raises:
        LaunchError: E518 a difference forbids it; E506 there are differences and `accept` is False.
    """
    forbidden = state_differences(old, new)
    if forbidden:
        raise LaunchError(
            "E518",
            f"the plan differs from that of {run.run_id}: {_in_words(forbidden)}",
            why="these decide what the saved state means, in which order data comes or how it is sampled",
            fix="launch it as a new run, or resume with the run's own values",
            run=run.run_id,
            differences=forbidden,
        )
    differences = plan_differences(old, new)
    if differences and not accept:
        raise LaunchError(
            "E506",
            f"the plan differs from that of {run.run_id}: {_in_words(differences)}",
            why="a run continues with other settings only when a person says so",
            fix="pass --accept-changes, or resume without a manifest to keep the run's own plan",
            run=run.run_id,
            differences=differences,
        )
    return differences


def _in_words(differences: list[dict[str, Any]]) -> str:
    shown = [f"{d['key']} {d['old']!r} -> {d['new']!r}" for d in differences[:8]]
    more = len(differences) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _is_under(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith((f"{prefix}.", f"{prefix}["))


def _leaves(value: Any, key: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        parts = ((f"{key}.{name}" if key else name, item) for name, item in value.items())
    elif isinstance(value, list) and value:
        parts = ((f"{key}[{index}]", item) for index, item in enumerate(value))
    else:
        return {key: value}
    return {k: v for name, item in parts for k, v in _leaves(item, name).items()}
