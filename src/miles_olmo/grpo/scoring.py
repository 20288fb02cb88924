"""Rewards of a group: every answer gets a number from its verifier, or the whole group gets none.

A failure of infrastructure (a grader that cannot be reached) is never a reward. The group is then
reported as failed, and the source samples and scores it again a bounded number of times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from miles_olmo.tasks.prompts import Prompt
from miles_olmo.tasks.verifiers import Answer, InfrastructureError, Scored, Ungradable, Verifier
from miles_olmo.wire.trajectory import Trajectory

UNGRADABLE_REWARD = 0.0
"""Reward of an answer that its verifier cannot grade; such answers are counted."""


@dataclass
class Scorer:
    """Scores groups and counts what went wrong."""

    verifiers: Mapping[str, Verifier]
    """By the name in the data's `dataset` column."""
    eos_token: str
    """Token that ends a response."""
    num_ungradable: int = 0
    num_infrastructure_errors: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """How often each reason was given."""

    def score_group(
        self, prompt: Prompt, trajectories: tuple[Trajectory, ...]
    ) -> tuple[float, ...] | None:
        """One finite reward per trajectory `[G]`, or None if any could not be scored at all."""
        rewards = []
        for trajectory in trajectories:
            verifier = self.verifiers[prompt.verifier]
            result = verifier(
                Answer(
                    trajectory.text, prompt.ground_truth, trajectory.finish_reason, self.eos_token
                )
            )
            match result:
                case Scored(value=value) if math.isfinite(value):
                    rewards.append(float(value))
                case Scored():
                    self._count_infrastructure_error(
                        "the verifier returned a number that is not finite"
                    )
                    return None
                case Ungradable(reason=reason):
                    self.num_ungradable += 1
                    self.reasons[reason] = self.reasons.get(reason, 0) + 1
                    rewards.append(UNGRADABLE_REWARD)
                case InfrastructureError(reason=reason):
                    self._count_infrastructure_error(reason)
                    return None
        return tuple(rewards)

    def _count_infrastructure_error(self, reason: str) -> None:
        self.num_infrastructure_errors += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
