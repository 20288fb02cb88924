"""From scored groups to packs: token for token what the engine sampled, nothing added.

Alignment is that of `miles_olmo.algo.pack` and `miles_olmo.wire.trajectory`. A sequence carries its
own advantage and routes, so dropping or reordering sequences cannot misalign them.

Dimension legend: T tokens, L routed layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from miles_olmo.algo.advantages import GroupAdvantages
from miles_olmo.algo.pack import Pack
from miles_olmo.algo.pack_rows import pack_rows
from miles_olmo.algo.packing import pack_lengths
from miles_olmo.base.errors import TrainingError
from miles_olmo.wire.trajectory import NO_ROUTE, ScoredGroup, Segment, Trajectory


@dataclass(frozen=True)
class TrainingSequence:
    """One trajectory, ready to be packed."""

    index: int
    """Position in the global batch, 0..S-1."""
    sample_id: str
    """As in `Trajectory.sample_id`."""
    ids_T: torch.Tensor
    """Token ids, int64 [T]."""
    mask_T: torch.Tensor
    """Trained tokens, bool [T]."""
    behaviour_logprobs_T: torch.Tensor
    """Logprobs reported by the engine, float32 [T]; 0 where nothing was sampled."""
    routes_TLK: torch.Tensor | None
    """Recorded experts, int64 [T, L, K], -1 = not recorded; None if there are none at all."""
    advantage: float
    """Advantage of every token."""

    @property
    def num_tokens(self) -> int:
        return int(self.ids_T.numel())

    @property
    def num_required_routes(self) -> int:
        """Rows that logprobs depend on: all but the last token's."""
        return self.num_tokens - 1

    @property
    def num_recorded_routes(self) -> int:
        """Required rows that were recorded."""
        if self.routes_TLK is None:
            return 0
        return int(np.count_nonzero(self.routes_TLK.numpy()[:-1, 0, 0] != NO_ROUTE))


@dataclass(frozen=True, slots=True)
class RouteCoverage:
    """How many routes the batch needs and how many the engines recorded."""

    required: int
    recorded: int

    @property
    def share(self) -> float:
        return self.recorded / self.required if self.required else 1.0

    def require(self, minimum: float) -> None:
        """Refuse a batch that would silently route natively.

        Raises:
            TrainingError: E316, the share is below `minimum`.
        """
        if self.share < minimum:
            raise TrainingError(
                "E316",
                f"engines recorded {self.recorded} of {self.required} routes "
                f"({self.share:.1%}), train.replay.min_coverage is {minimum}",
                why="tokens without a recorded route are trained through other experts",
                fix="use engines that return routed experts, or lower train.replay.min_coverage",
                recorded=self.recorded,
                required=self.required,
            )


def route_coverage(sequences: Sequence[TrainingSequence]) -> RouteCoverage:
    """Coverage of a batch."""
    return RouteCoverage(
        sum(sequence.num_required_routes for sequence in sequences),
        sum(sequence.num_recorded_routes for sequence in sequences),
    )


def training_sequences(
    groups: Sequence[ScoredGroup],
    advantages: Sequence[GroupAdvantages],
    *,
    truncated: Literal["mask", "score"],
    replay: bool,
) -> list[TrainingSequence]:
    """The trajectories of all groups, in order, numbered from 0.

    Args:
        advantages: One per group, in the same order.
        truncated: "mask" trains on no token of a trajectory that ran into its length limit.
        replay: Carry recorded routes; without it they are left behind.

    Raises:
        TrainingError: E317, a trajectory was aborted or is not consistent.
    """
    sequences = []
    for group, group_advantages in zip(groups, advantages, strict=True):
        pairs = zip(group.trajectories, group_advantages.advantages_G, strict=True)
        for trajectory, advantage in pairs:
            sequences.append(
                _sequence(len(sequences), trajectory, advantage, truncated=truncated, replay=replay)
            )
    return sequences


def build_packs(
    sequences: Sequence[TrainingSequence], max_tokens: int, *, share_prefixes: bool = True
) -> list[Pack]:
    """Pack sequences as densely as `pack_lengths` can; each is in exactly one pack.

    Args:
        share_prefixes: See `pack_rows`.

    Raises:
        TrainingError: E311, a sequence is longer than a pack.
    """
    plan = pack_lengths([sequence.num_tokens for sequence in sequences], max_tokens)
    return [
        build_pack([sequences[position] for position in pack], share_prefixes=share_prefixes)
        for pack in plan
    ]


def build_pack(sequences: Sequence[TrainingSequence], *, share_prefixes: bool = True) -> Pack:
    """Join sequences into one pack, in the given order."""
    advantages = [
        torch.full((sequence.num_tokens,), sequence.advantage, dtype=torch.float32)
        for sequence in sequences
    ]
    ids_T, routes_TLK = torch.cat([s.ids_T for s in sequences]), _join_routes(sequences)
    lengths = tuple(sequence.num_tokens for sequence in sequences)
    row_T, token_R = pack_rows(ids_T, routes_TLK, lengths, share_prefixes=share_prefixes)
    return Pack(
        ids_T=ids_T,
        document_lengths=lengths,
        sequence_indices=tuple(sequence.index for sequence in sequences),
        mask_T=torch.cat([sequence.mask_T for sequence in sequences]),
        advantages_T=torch.cat(advantages),
        behaviour_logprobs_T=torch.cat([s.behaviour_logprobs_T for s in sequences]),
        routes_TLK=routes_TLK,
        row_T=row_T,
        token_R=token_R,
    )


def _sequence(
    index: int, trajectory: Trajectory, advantage: float, *, truncated: str, replay: bool
) -> TrainingSequence:
    if trajectory.finish_reason == "abort":
        raise _inconsistent(trajectory, "it was aborted")
    for segment in trajectory.segments:
        _check(trajectory, segment)
    mask = [trained for segment in trajectory.segments for trained in segment.loss_mask]
    if truncated == "mask" and trajectory.finish_reason == "length":
        mask = [False] * len(mask)
    if not mask or mask[0]:
        raise _inconsistent(trajectory, "its first token is trained, or it has none")
    logprobs = [value for s in trajectory.segments for value in (s.logprobs or (0.0,) * len(s.ids))]
    return TrainingSequence(
        index=index,
        sample_id=trajectory.sample_id,
        ids_T=torch.tensor(trajectory.ids, dtype=torch.int64),
        mask_T=torch.tensor(mask, dtype=torch.bool),
        behaviour_logprobs_T=torch.tensor(logprobs, dtype=torch.float32),
        routes_TLK=_trajectory_routes(trajectory) if replay else None,
        advantage=advantage,
    )


def _trajectory_routes(trajectory: Trajectory) -> torch.Tensor | None:
    recorded = [s.routes for s in trajectory.segments if s.routes is not None]
    if not recorded:
        return None
    layers_and_k = recorded[0].shape[1:]
    rows = [
        np.full((len(s.ids), *layers_and_k), NO_ROUTE) if s.routes is None else s.routes
        for s in trajectory.segments
    ]
    routes_TLK = np.concatenate(rows, dtype=np.int64)
    routes_TLK[-1] = NO_ROUTE  # the last token is never an input
    missing_TX = (routes_TLK == NO_ROUTE).reshape(len(routes_TLK), -1)
    if (missing_TX != missing_TX[:, :1]).any():
        position = int((missing_TX != missing_TX[:, :1]).any(1).argmax())
        raise _inconsistent(trajectory, f"the routes of token {position} are recorded in part")
    return torch.from_numpy(routes_TLK)


def _join_routes(sequences: Sequence[TrainingSequence]) -> torch.Tensor | None:
    recorded = [s.routes_TLK for s in sequences if s.routes_TLK is not None]
    if not recorded:
        return None
    layers_and_k = recorded[0].shape[1:]
    return torch.cat(
        [
            torch.full((s.num_tokens, *layers_and_k), NO_ROUTE, dtype=torch.int64)
            if s.routes_TLK is None
            else s.routes_TLK
            for s in sequences
        ]
    )


def _check(trajectory: Trajectory, segment: Segment) -> None:
    """A segment's parts must all speak about the same tokens."""
    length = len(segment.ids)
    if len(segment.loss_mask) != length:
        raise _inconsistent(trajectory, f"{len(segment.loss_mask)} mask entries, {length} tokens")
    if segment.logprobs is not None and len(segment.logprobs) != length:
        raise _inconsistent(trajectory, f"{len(segment.logprobs)} logprobs, {length} tokens")
    if segment.logprobs is None and any(segment.loss_mask):
        raise _inconsistent(trajectory, "tokens without logprobs are trained")
    if segment.routes is not None and len(segment.routes) != length:
        raise _inconsistent(trajectory, f"{len(segment.routes)} route rows, {length} tokens")


def _inconsistent(trajectory: Trajectory, reason: str) -> TrainingError:
    return TrainingError(
        "E317",
        f"sample {trajectory.sample_id} cannot be trained on: {reason}",
        why="a group is trained whole and token for token, or not at all",
        fix="report the engine that produced it; its answers do not fit together",
        sample_id=trajectory.sample_id,
    )
