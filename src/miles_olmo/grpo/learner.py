"""One training step on scored groups: advantages, packs, loss, update.

GRPO with the variant choices of `miles_olmo.algo`. Groups whose answers all got the same reward carry
no signal: they are left out of the batch, and so out of its denominators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from miles_olmo.algo.advantages import GroupAdvantages, group_advantages
from miles_olmo.algo.loss import policy_loss
from miles_olmo.algo.loss_sums import LossSums
from miles_olmo.algo.metrics import training_metrics
from miles_olmo.algo.normaliser import LossNormaliser
from miles_olmo.algo.pack import Pack
from miles_olmo.algo.pack_builder import (
    RouteCoverage,
    TrainingSequence,
    build_packs,
    route_coverage,
    training_sequences,
)
from miles_olmo.base.errors import TrainingError
from miles_olmo.grpo.router_losses import RouterLosses
from miles_olmo.manifest.models import Manifest
from miles_olmo.policy.family import FamilyAdapter, RouterStatistics
from miles_olmo.policy.optimizer import PolicyOptimizer
from miles_olmo.policy.schedule import learning_rate
from miles_olmo.wire.trajectory import ScoredGroup


@dataclass
class Learner:
    """The policy and its optimizer."""

    module: nn.Module
    adapter: FamilyAdapter
    optimizer: PolicyOptimizer
    manifest: Manifest
    reference: nn.Module | None = None
    """Frozen policy at the start of RL; only with a KL penalty."""

    @property
    def needs_reference(self) -> bool:
        return self.manifest.algorithm.kl.coefficient > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """TIS compares the engine with the trainer's own logprobs at the start of an update."""
        return self.manifest.algorithm.importance_sampling.enabled

    def update(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Learn from the groups that carry signal.

        Returns:
            Metrics of the step; empty if no group carries signal (nothing was changed).

        Raises:
            TrainingError: E316 too few recorded routes; E310 or E315 a gradient or loss that is not
                finite, before the optimizer has touched anything, with the sample ids.
        """
        signal = groups_with_signal(groups, self.manifest)
        metrics: list[dict[str, float]] = []
        for batch in split_evenly(signal, self.manifest.train.updates_per_step):
            metrics.append(self._update_on(batch))
        if not metrics:
            return {}
        joined = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
        largest = "train/train_rollout_logprob_abs_diff_max"
        return {
            **joined,
            largest: max(m[largest] for m in metrics),
            "train/num_groups": len(signal),
            "rollout/dynamic_filter/drop_zero_std": len(groups) - len(signal),
        }

    def _update_on(
        self, batch: Sequence[tuple[ScoredGroup, GroupAdvantages]]
    ) -> dict[str, float]:
        """One optimizer update."""
        train, algorithm = self.manifest.train, self.manifest.algorithm
        sequences = training_sequences(
            [group for group, _ in batch],
            [advantages for _, advantages in batch],
            truncated=self.manifest.rollout.truncated,
            replay=train.replay.enabled,
        )
        coverage = route_coverage(sequences)
        if train.replay.enabled:
            coverage.require(train.replay.min_coverage)
        packs = [self._with_logprobs(p) for p in build_packs(sequences, train.packing.max_tokens)]
        normaliser = LossNormaliser.of_packs(packs, constant_length=self._constant_length())
        router_losses = RouterLosses.for_batch(self.adapter, self.module, packs, train)
        rate = learning_rate(
            self.optimizer.num_updates,
            train.optimizer.learning_rate,
            train.schedule,
            train.steps * train.updates_per_step,
        )
        sums, router = LossSums(), None
        self.optimizer.zero_gradients()
        try:
            for pack in packs:
                output = self.adapter.forward(
                    self.module, pack, temperature=self.manifest.rollout.temperature
                )
                loss, pack_sums = policy_loss(
                    pack, output.logprobs_T, algorithm, normaliser, entropy_T=output.entropy_T
                )
                (loss + router_losses.of_pack(output.router)).backward()
                sums += pack_sums
                router = add_router_statistics(router, output.router)
            norm = self.optimizer.step(rate)
        except TrainingError as error:
            raise with_sample_ids(error, sequences) from error
        assert router is not None
        return {
            **training_metrics(sums),
            **router_metrics(router, coverage),
            **router_losses.metrics(),
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/num_packs": len(packs),
            "train/pack_fill": sum(p.num_tokens for p in packs)
            / (len(packs) * train.packing.max_tokens),
            "train/num_tokens": sum(p.num_tokens for p in packs),
        }

    @torch.no_grad()
    def _with_logprobs(self, pack: Pack) -> Pack:
        """Add what the loss compares with: the proximal and the reference policy's logprobs."""
        temperature = self.manifest.rollout.temperature
        if self.needs_old_logprobs:
            old = self.adapter.forward(self.module, pack, temperature=temperature)
            pack = replace(pack, old_logprobs_T=old.logprobs_T)
        if self.reference is not None:
            reference = self.adapter.forward(self.reference, pack, temperature=temperature)
            pack = replace(pack, reference_logprobs_T=reference.logprobs_T)
        return pack

    def _constant_length(self) -> int:
        algorithm, rollout = self.manifest.algorithm, self.manifest.rollout
        return algorithm.constant_length or rollout.max_response_tokens


Item = TypeVar("Item")


def groups_with_signal(
    groups: Sequence[ScoredGroup], manifest: Manifest
) -> list[tuple[ScoredGroup, GroupAdvantages]]:
    """Groups in which some trained answer has an advantage, with all their advantages."""
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


def add_router_statistics(
    total: RouterStatistics | None, more: RouterStatistics
) -> RouterStatistics:
    """Sum over packs, without gradient."""
    more = replace(
        more,
        probability_sums_LE=more.probability_sums_LE.detach(),
        z_sums_L=more.z_sums_L.detach(),
    )
    if total is None:
        return more
    return RouterStatistics(
        **{name: getattr(total, name) + getattr(more, name) for name in vars(more)}
    )


def router_metrics(router: RouterStatistics, coverage: RouteCoverage) -> dict[str, float]:
    """Load per expert relative to its uniform share, and how the replay went.

    `load_e * E / (T * K)` is 1 for an expert with its uniform share. `replay_mismatch` is the share
    of replayed positions and layers whose native choice would have been another set of experts.
    """
    counts_LE = router.counts_LE
    share_LE = counts_LE / counts_LE.sum(1, keepdim=True).clamp(min=1) * counts_LE.shape[1]
    replayed = router.num_replayed * counts_LE.shape[0]
    return {
        "router/load_imbalance": float(share_LE.max(1).values.mean()),
        "router/min_load_ratio": float(share_LE.min()),
        "router/replay_coverage": coverage.share,
        "router/replay_applied": router.num_replayed / max(router.num_required, 1),
        "router/replay_mismatch": float(router.native_mismatch_L.sum()) / max(replayed, 1),
    }


def with_sample_ids(error: TrainingError, sequences: Sequence[TrainingSequence]) -> TrainingError:
    """The same error, naming the samples of the sequences it is about (all if it names none)."""
    indices = error.details.get("sequences", range(len(sequences)))
    samples = [sequences[index].sample_id for index in indices]
    return TrainingError(
        error.code,
        error.what,
        why=error.why,
        fix=error.fix,
        **{**error.details, "sample_ids": samples},
    )
