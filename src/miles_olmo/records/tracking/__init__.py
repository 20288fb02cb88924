"""Copies of a run's metrics for other viewers: TensorBoard and Weights & Biases, off by default.

`metrics.jsonl` is the record; a tracker only repeats it. Whatever goes wrong in one is counted
(`logging/<name>_faults`), leaves a receipt the first time, and never stops training.

Tags are the metrics' names; those of the warm-up, whose steps are counted apart, get `warmup/` in front.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.manifest.models import Manifest
from miles_olmo.records.receipts import ReceiptLog

TENSORBOARD = "tensorboard"
WANDB = "wandb"


class Tracker(Protocol):
    """One viewer. Every method may raise anything; `Trackers` counts it."""

    name: str

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Repeat one row of the metrics."""
        ...

    def faults(self) -> Sequence[str]:
        """What went wrong since the last call, outside of `write`."""
        ...

    def close(self) -> None:
        """Deliver what is left, within a bound."""
        ...


class Trackers:
    """All trackers of a run; none of them can stop it."""

    def __init__(self, receipts: ReceiptLog, attempt: int) -> None:
        self._receipts = receipts
        self._attempt = attempt
        self._trackers: list[Tracker] = []
        self._faults: dict[str, int] = {}

    def add(self, name: str, make: Callable[[], Tracker]) -> None:
        """Start a tracker with `make()`; one that does not start is counted and left out."""
        self._faults[name] = 0
        try:
            self._trackers.append(make())
        except Exception as error:
            self._count(name, f"{type(error).__name__}: {error}")

    def write(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Repeat one row of the metrics in every tracker."""
        for tracker in self._trackers:
            self._guarded(tracker, lambda t=tracker: t.write(phase, step, values))
            self._collect(tracker)

    def counters(self) -> dict[str, float]:
        """Rows that did not arrive, and other faults, since the process started."""
        return {f"logging/{name}_faults": count for name, count in self._faults.items()}

    def close(self) -> None:
        """End every tracker; the receipt of one with faults says how many there were."""
        for tracker in self._trackers:
            self._guarded(tracker, tracker.close)
            self._collect(tracker)
            if self._faults[tracker.name]:
                body = {"tracker": tracker.name, "faults": self._faults[tracker.name]}
                self._receipts.append("tracker-ended", {"attempt": self._attempt, **body})
        self._trackers.clear()

    def _guarded(self, tracker: Tracker, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._count(tracker.name, f"{type(error).__name__}: {error}")

    def _collect(self, tracker: Tracker) -> None:
        for fault in tracker.faults():
            self._count(tracker.name, fault)

    def _count(self, name: str, fault: str) -> None:
        self._faults[name] += 1
        if self._faults[name] == 1:
            body = {"attempt": self._attempt, "tracker": name, "fault": fault[:500]}
            self._receipts.append("tracker-fault", body)


def open_trackers(
    manifest: Manifest, run: RunDirectory, attempt: int, receipts: ReceiptLog
) -> Trackers:
    """The trackers that `[logging]` asks for."""
    trackers, settings = Trackers(receipts, attempt), manifest.logging
    if settings.tensorboard:
        from miles_olmo.records.tracking.tensorboard_files import TensorBoardTracker

        trackers.add(TENSORBOARD, lambda: TensorBoardTracker(run.root / TENSORBOARD, attempt))
    if settings.wandb.enabled:
        from miles_olmo.records.tracking.wandb_client import WandbTracker

        config = manifest.model_dump(mode="json")
        trackers.add(WANDB, lambda: WandbTracker(settings.wandb, run, attempt, config))
    return trackers


def tag(phase: str, name: str) -> str:
    """Name of a metric in a viewer."""
    return f"warmup/{name}" if phase == "warmup" else name
