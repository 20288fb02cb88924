"""From scored groups to the packs of one optimizer update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from miles_olmo.algo.advantages import GroupAdvantages, group_advantages
from miles_olmo.algo.normaliser import LossNormaliser
from miles_olmo.algo.pack import Pack
from miles_olmo.algo.pack_builder import (
    RouteCoverage,
    TrainingSequence,
    build_packs,
    route_coverage,
    training_sequences,
)
from miles_olmo.manifest.models import Manifest
from miles_olmo.wire.trajectory import ScoredGroup

Item = TypeVar("Item")
GroupWithAdvantages = tuple[ScoredGroup, GroupAdvantages]


@dataclass(frozen=True)
class UpdateBatch:
    """All that one optimizer update needs."""

    sequences: tuple[TrainingSequence, ...]
    packs: tuple[Pack, ...]
    """Every sequence in exactly one pack; a pack is a microbatch."""
    normaliser: LossNormaliser
    """The batch's denominators, equal for every pack."""
    coverage: RouteCoverage


def update_batch(groups: Sequence[GroupWithAdvantages], manifest: Manifest) -> UpdateBatch:
    """Pack the trajectories of the groups.

    Raises:
        TrainingError: E316, fewer recorded routes than `train.replay.min_coverage`; E313, no
            trained token; E317, an aborted trajectory.
    """
    train = manifest.train
    sequences = training_sequences(
        [group for group, _ in groups],
        [advantages for _, advantages in groups],
        truncated=manifest.rollout.truncated,
        replay=train.replay.enabled,
    )
    coverage = route_coverage(sequences)
    if train.replay.enabled:
        coverage.require(train.replay.min_coverage)
    packing = train.packing
    packs = build_packs(sequences, packing.max_tokens, share_prefixes=packing.share_prefixes)
    constant = manifest.algorithm.constant_length or manifest.rollout.max_response_tokens
    normaliser = LossNormaliser.of_packs(packs, constant_length=constant)
    return UpdateBatch(tuple(sequences), tuple(packs), normaliser, coverage)


def groups_with_signal(
    groups: Sequence[ScoredGroup], manifest: Manifest
) -> list[GroupWithAdvantages]:
    """Groups in which some trained answer has an advantage, with all their advantages.

    The others would add nothing but their KL gradient; they are left out of the batch, and so out
    of its denominators, and counted.
    """
    pairs = []
    for group in groups:
        advantages = group_advantages(group.rewards, manifest.algorithm.advantage)
        trained = [
            manifest.rollout.truncated == "score" or trajectory.finish_reason != "length"
            for trajectory in group.trajectories
        ]
        if any(a != 0.0 and t for a, t in zip(advantages.advantages_G, trained, strict=True)):
            pairs.append((group, advantages))
    return pairs


def split_evenly(items: Sequence[Item], parts: int) -> Iterator[Sequence[Item]]:
    """At most `parts` runs of consecutive items, none empty, sizes differing by at most one."""
    parts = min(parts, len(items))
    for part in range(parts):
        yield items[len(items) * part // parts : len(items) * (part + 1) // parts]
