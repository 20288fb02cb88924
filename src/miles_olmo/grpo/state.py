"""Where a run stands: what a checkpoint continues, beside weights, optimizer and cursor."""

from __future__ import annotations

from dataclasses import dataclass, field

from miles_olmo.grpo.collapse_alarm import AlarmState


@dataclass
class RunState:
    """Counters of the loop."""

    step: int = 0
    """Training steps finished, skipped ones included."""
    version: int = 0
    """Policy version; grows with every change of the weights that engines may see."""
    alarm: AlarmState = field(default_factory=AlarmState)
    """Experts that the collapse alarm watches."""
