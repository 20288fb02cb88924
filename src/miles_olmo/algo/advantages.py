"""Group-relative advantages: how much better an answer is than the others to the same prompt.

Variant: GRPO (Shao et al. 2024, arXiv 2402.03300): reward minus the mean of its group, divided by the
group's unbiased standard deviation + 1e-6. With `std = "none"`: Dr. GRPO (Liu et al. 2025,
arXiv 2503.20783), centred only. With `baseline = "none"`: the reward itself (REINFORCE).

Left out: value functions and per-token rewards (one advantage per answer), leave-one-out baselines
(equal to the mean up to the factor G / (G - 1)), normalisation over the batch (it would let one
prompt's difficulty scale another's advantage).

Dimension legend: G answers of one group; groups may differ in size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from miles_olmo.base.errors import TrainingError
from miles_olmo.manifest.models import Advantage

STD_EPSILON = 1e-6
"""Added to the standard deviation, as in GRPO's public implementations."""


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """What a group's rewards say about each of its answers."""

    advantages_G: tuple[float, ...]
    """One advantage per answer [G]."""
    mean: float
    """Mean reward of the group."""
    std: float
    """Unbiased standard deviation of the rewards; 0 for a group of one."""

    @property
    def carries_signal(self) -> bool:
        """Whether any answer has an advantage; the others would only add to a KL gradient."""
        return any(advantage != 0.0 for advantage in self.advantages_G)


def group_advantages(rewards_G: Sequence[float], settings: Advantage) -> GroupAdvantages:
    """Advantages of one group, from its own rewards alone.

    Raises:
        TrainingError: E312, the group is empty or a reward is NaN or infinite.
    """
    if not rewards_G or not all(math.isfinite(reward) for reward in rewards_G):
        raise TrainingError(
            "E312",
            f"the rewards of a group are {list(rewards_G)}",
            why="advantages need at least one reward, and all of them finite",
            fix="make the verifier return a finite number, or fail the sample",
        )
    # Exact comparison first: a mean of equal floats may be off by one rounding.
    constant = min(rewards_G) == max(rewards_G)
    mean = rewards_G[0] if constant else statistics.fmean(rewards_G)
    std = 0.0 if constant else _unbiased_std(rewards_G, mean)
    baseline = mean if settings.baseline == "group_mean" else 0.0
    scale = std + STD_EPSILON if settings.std == "unbiased" and std > 0 else 1.0
    return GroupAdvantages(tuple((reward - baseline) / scale for reward in rewards_G), mean, std)


def _unbiased_std(rewards_G: Sequence[float], mean: float) -> float:
    squares = math.fsum((reward - mean) ** 2 for reward in rewards_G)
    return math.sqrt(squares / (len(rewards_G) - 1))
