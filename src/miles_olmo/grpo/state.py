"""Where a run stands: what a checkpoint continues, beside weights and optimizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunState:
    """Counters of the loop."""

    step: int = 0
    """Training steps finished, skipped ones included."""
    version: int = 0
    """Policy version: how often the weights have changed in a way that engines can see."""
    num_updates: int = 0
    """Optimizer updates of RL; the schedule's clock."""
