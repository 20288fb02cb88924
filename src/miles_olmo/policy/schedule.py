"""The learning rate as a pure function of the update index: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from miles_olmo.manifest.models import Schedule


def learning_rate(update: int, peak: float, schedule: Schedule, num_updates: int) -> float:
    """Learning rate of one optimizer update.

    Args:
        update: Index of the update, 0 for the first.
        peak: `train.optimizer.learning_rate`.
        num_updates: Updates of the whole run; later ones keep the last rate.

    The ramp rises in equal parts and ends just before `ramp_steps`: update 0 has 1 / (ramp_steps + 1)
    of the peak, update `ramp_steps` the peak. Linear and cosine then fall to
    `final_fraction * peak`, which the last update has.
    """
    assert update >= 0
    ramp = schedule.ramp_steps
    if update < ramp:
        return peak * (update + 1) / (ramp + 1)
    if schedule.kind == "constant":
        return peak
    progress = min((update - ramp) / max(num_updates - 1 - ramp, 1), 1.0)
    height = 1.0 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * height)
