"""Where training samples come from: prompts in a fixed order, sampled in groups, scored, counted.

The source owns the cursor. Group g of a run is always the same prompt with the same sampling seed,
whichever engine serves it and whether or not the run was interrupted in between; so a resumed run
consumes exactly the samples that an uninterrupted one would have.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from miles_olmo.base.errors import TrainingError
from miles_olmo.base.seeds import derive_seed
from miles_olmo.grpo.scoring import Scorer
from miles_olmo.manifest.models import Rollout
from miles_olmo.rollout.client import FleetClient, GroupRequest
from miles_olmo.tasks.order import prompt_index
from miles_olmo.tasks.prompts import PromptSet
from miles_olmo.wire.trajectory import ScoredGroup, Trajectory

GROUP_ATTEMPTS = 3
"""How often a group is sampled and scored before it is dropped, when its verifier fails."""


@dataclass
class SampleSource:
    """Synchronous source: samples groups at the moment they are taken."""

    prompts: PromptSet
    fleet: FleetClient
    scorer: Scorer
    rollout: Rollout
    seed: int
    shuffle: bool
    stop_token_ids: tuple[int, ...]
    position: int = 0
    """Groups taken since the run's start; the next group's id."""
    num_groups_dropped: int = 0
    """Groups whose verifier failed GROUP_ATTEMPTS times."""
    _in_flight: set[int] = field(default_factory=set)
    _counted: dict[str, float] = field(default_factory=dict)
    """Counters of the steps before this process."""

    async def take(self, num_groups: int, version: int) -> list[ScoredGroup]:
        """Sample, score and hand out the next groups, in order.

        Args:
            num_groups: How many group ids to consume.
            version: Policy version that must produce every token.

        Returns:
            At most `num_groups` groups, ordered by group id; fewer if some were dropped.

        Raises:
            EngineError: an engine broke the protocol, or none answered within its bounds. The
                cursor has not moved then.
        """
        ids = range(self.position, self.position + num_groups)
        self._in_flight.update(ids)
        try:
            async with asyncio.TaskGroup() as tasks:
                pending = [tasks.create_task(self._sample_and_score(i, version)) for i in ids]
        except BaseExceptionGroup as failures:
            raise first_leaf(failures) from failures
        finally:
            self._in_flight.difference_update(ids)
        self.position += num_groups
        return [group for task in pending if (group := task.result()) is not None]

    async def _sample_and_score(self, group_id: int, version: int) -> ScoredGroup | None:
        index = prompt_index(group_id, len(self.prompts), seed=self.seed, shuffle=self.shuffle)
        prompt = self.prompts[index]
        for attempt in range(GROUP_ATTEMPTS):
            trajectories = await self.fleet.generate_group(
                GroupRequest(
                    group_id=group_id,
                    prompt_ids=prompt.ids,
                    num_samples=self.rollout.samples_per_prompt,
                    max_tokens=self.rollout.max_response_tokens,
                    temperature=self.rollout.temperature,
                    seed=derive_seed(self.seed, "sample", group_id, attempt) // 2,
                    stop_token_ids=self.stop_token_ids,
                )
            )
            rewards = self.scorer.score_group(prompt, trajectories)
            if rewards is not None:
                self._check_staleness(group_id, trajectories, version)
                return ScoredGroup(group_id, prompt.prompt_id, trajectories, rewards)
        self.num_groups_dropped += 1
        return None

    def _check_staleness(
        self, group_id: int, trajectories: tuple[Trajectory, ...], version: int
    ) -> None:
        """Synchronous training has no stale token."""
        oldest = min(t.oldest_version or version for t in trajectories)
        if oldest != version:
            raise TrainingError(
                "E351",
                f"group {group_id} has tokens of version {oldest}, version {version} is trained",
                why="synchronous training allows no policy lag",
                fix="look at the engine's log; its weights were not the published ones",
            )

    def counters(self) -> dict[str, float]:
        """What was dropped, retried or could not be graded since the run's start.

        A resume goes on from the counts of its checkpoint.
        """
        now = {
            "rollout/dynamic_filter/drop_verifier_failed": self.num_groups_dropped,
            "rollout/ungradable": self.scorer.num_ungradable,
            "rollout/verifier_errors": self.scorer.num_infrastructure_errors,
            **{f"rollout/engine/{name}": count for name, count in self.fleet.counters.items()},
        }
        return {name: count + self._counted.get(name, 0) for name, count in now.items()}

    def state(self) -> dict[str, Any]:
        """The cursor, for a checkpoint: the low-water mark, the ids in flight, and the counters."""
        return {
            "position": self.position,
            "in_flight": sorted(self._in_flight),
            "counters": self.counters(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Ids in flight are sampled again."""
        self.position = min([state["position"], *state["in_flight"]])
        self._counted = dict(state.get("counters", {}))


def first_leaf(group: BaseExceptionGroup) -> BaseException:
    """The first real exception inside nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
