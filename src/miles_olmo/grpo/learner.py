"""One training step on scored groups: advantages, packs, loss, update.

GRPO in the variant that `miles_olmo.algo.advantages` and `miles_olmo.algo.loss` describe. Gradients of
all packs are added up before the optimizer runs, so the step does not depend on how the batch was
packed.

Several trainer processes: the leader cuts the batch into shares (`shares`) and hands them out; then
every process calls `learn` with its own. Passes, gradient sums and metric sums are collectives, so
`learn` runs the same ones in the same order everywhere, whatever a share holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from operator import add

import torch
from torch import nn

from miles_olmo.algo.loss import policy_loss
from miles_olmo.algo.loss_sums import LossSums
from miles_olmo.algo.metrics import training_metrics
from miles_olmo.algo.pack import Pack
from miles_olmo.base.errors import TrainingError
from miles_olmo.grpo.batch import UpdateBatch, groups_with_signal, split_evenly, update_batch
from miles_olmo.grpo.router_losses import RouterLosses
from miles_olmo.grpo.router_report import RouterTotals, without_counts
from miles_olmo.grpo.shares import EMPTY, BatchShare, share_out, shares_message
from miles_olmo.grpo.work import Work
from miles_olmo.manifest.models import Manifest
from miles_olmo.policy.family import FamilyAdapter, PackOutput, RouterStatistics
from miles_olmo.policy.optimizer import PolicyOptimizer
from miles_olmo.policy.ranks import ALONE, LOST_RANK_CODES, Ranks
from miles_olmo.policy.schedule import learning_rate
from miles_olmo.wire.trajectory import ScoredGroup

LARGEST_DIFFERENCE = "train/train_rollout_logprob_abs_diff_max"


@dataclass
class Learner:
    """The policy and its optimizer."""

    module: nn.Module
    adapter: FamilyAdapter
    optimizer: PolicyOptimizer
    manifest: Manifest
    reference: nn.Module | None = None
    """Frozen policy at the start of RL; present when `needs_reference`."""
    expert_counts_LE: torch.Tensor | None = None
    """Times each expert was used in the last step, all updates together; None if it trained nothing."""
    ranks: Ranks = ALONE

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        return next(self.module.parameters()).device

    @property
    def needs_reference(self) -> bool:
        return self.manifest.algorithm.kl.coefficient > 0

    def update(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Learn from the groups that carry signal.

        Returns:
            Metrics of the step; empty if no group carries signal (nothing was changed).

        Raises:
            TrainingError: E316, too few recorded routes; E310 or E315, a gradient or loss that is
                not finite, before the optimizer has touched anything, with the sample ids.
        """
        self.expert_counts_LE = None
        signal = groups_with_signal(groups, self.manifest)
        parts = split_evenly(signal, self.manifest.train.updates_per_step)
        shares = [self._share_out(update_batch(part, self.manifest)) for part in parts]
        if not shares:
            return {}
        if self.ranks.world > 1:
            of_ranks = zip(*shares, strict=True)
            self.ranks.announce(Work.LEARN, [shares_message(of_rank) for of_rank in of_ranks])
        metrics = self.learn([of_ranks[0] for of_ranks in shares])
        return {
            **metrics,
            "train/num_groups": len(signal),
            "train/num_updates": self.optimizer.num_updates,
        }

    def learn(self, shares: Sequence[BatchShare]) -> dict[str, float]:
        """All updates of one step, on this process's share of each.

        Returns:
            Metrics of the global batch, the same on every process.
        """
        self.expert_counts_LE = None
        shares = [self._scored(share.to(self.device)) for share in shares]
        metrics = [self._update(share, is_first=i == 0) for i, share in enumerate(shares)]
        means = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
        return {**means, LARGEST_DIFFERENCE: max(m[LARGEST_DIFFERENCE] for m in metrics)}

    def take_weights(self) -> None:
        """Continue from the module's weights after something else has changed them."""
        self.ranks.announce(Work.REFRESH)
        self.optimizer.refresh_masters()

    def _share_out(self, batch: UpdateBatch) -> list[BatchShare]:
        train = self.manifest.train
        return share_out(
            batch,
            self.ranks.world,
            shape=self.manifest.model.shape,
            count_routes=train.load_balancing_loss.mode != "off" or train.z_loss.mode != "off",
        )

    def _update(self, share: BatchShare, *, is_first: bool) -> dict[str, float]:
        """One optimizer update."""
        train = self.manifest.train
        rate = learning_rate(
            self.optimizer.num_updates,
            train.optimizer.learning_rate,
            train.schedule,
            train.steps * train.updates_per_step,
        )
        router_losses = RouterLosses.for_batch(self.adapter, self.module, share, train, self.ranks)
        sums, router = LossSums(), RouterTotals()
        self.optimizer.zero_gradients()
        try:
            for pack in share.passes():
                if pack is None:
                    router.add(self._pass_without_loss())
                    continue
                output = self._forward(self.module, pack)
                loss, pack_sums = policy_loss(
                    self._with_old_logprobs(pack, output, is_first=is_first),
                    output.logprobs_T,
                    self.manifest.algorithm,
                    share.normaliser,
                    entropy_T=output.entropy_T,
                )
                (loss + router_losses.of_pack(output.router)).backward()
                sums += pack_sums
                router.add(output.router)
            norm = self.optimizer.step(rate)
        except TrainingError as error:
            raise with_sample_ids(error, share.sample_ids) from error
        totals = router.of_ranks(self.ranks)
        self._count_experts(totals)
        return {
            **training_metrics(sums_of_ranks(sums, self.ranks)),
            **totals.metrics(),
            **router_losses.metrics(self.ranks),
            "router/replay_coverage": share.coverage,
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/num_packs": share.num_packs,
            "train/num_tokens": share.num_tokens,
            "train/computed_ratio": share.num_rows / share.num_tokens,
            "train/pack_fill": share.num_tokens / (share.num_packs * train.packing.max_tokens),
        }

    def _count_experts(self, router: RouterTotals) -> None:
        counts_LE, before_LE = router.counts_LE, self.expert_counts_LE
        assert counts_LE is not None, "an update has packs"
        self.expert_counts_LE = counts_LE if before_LE is None else before_LE + counts_LE

    def _pass_without_loss(self) -> RouterStatistics:
        """Take part in a pass without a pack of one's own: a zero gradient, empty statistics."""
        output = self._forward(self.module, EMPTY.to(self.device))
        output.logprobs_T.sum().backward()
        return without_counts(output.router)

    def _forward(self, module: nn.Module, pack: Pack) -> PackOutput:
        return self.adapter.forward(module, pack, temperature=self.manifest.rollout.temperature)

    # Logprobs that the loss compares the current policy with.

    @torch.no_grad()
    def _scored(self, share: BatchShare) -> BatchShare:
        """Score the packs with the reference, and with the policy at the start of the step.

        The second is skipped where the current forward gives the same numbers: see
        `_with_old_logprobs`.
        """
        if self.reference is not None:
            share = self._with_scores(share, self.reference, "reference_logprobs_T")
        if self._needs_old_logprobs and self.manifest.train.updates_per_step > 1:
            share = self._with_scores(share, self.module, "old_logprobs_T")
        return share

    def _with_scores(self, share: BatchShare, module: nn.Module, name: str) -> BatchShare:
        outputs = [self._forward(module, pack or EMPTY.to(self.device)) for pack in share.passes()]
        packs = [
            replace(pack, **{name: output.logprobs_T})
            for pack, output in zip(share.packs, outputs, strict=False)  # passes may be more
        ]
        return replace(share, packs=tuple(packs))

    def _with_old_logprobs(self, pack: Pack, output: PackOutput, *, is_first: bool) -> Pack:
        """In the first update of a step, the policy at the step's start IS the current one."""
        if not self._needs_old_logprobs or pack.old_logprobs_T is not None:
            return pack
        assert is_first, "later updates of a step need a scoring pass"
        return replace(pack, old_logprobs_T=output.logprobs_T.detach())

    @property
    def _needs_old_logprobs(self) -> bool:
        """TIS compares the engine with the trainer's own logprobs."""
        return self.manifest.algorithm.importance_sampling.enabled


def with_sample_ids(error: TrainingError, sample_ids: Sequence[str]) -> TrainingError:
    """The same error, naming the samples of the sequences it is about (all if it names none)."""
    if error.code in LOST_RANK_CODES:
        return error  # it is about a process, not about a sample
    about: list[int] = error.details.get("sequences", list(range(len(sample_ids))))
    samples = [sample_ids[index] for index in about]
    return TrainingError(
        error.code,
        f"{error.what} (samples {', '.join(samples[:8])}{', ...' if len(samples) > 8 else ''})",
        why=error.why,
        fix=error.fix,
        **{**error.details, "sample_ids": samples},
    )


def sums_of_ranks(sums: LossSums, ranks: Ranks) -> LossSums:
    """The sums of all processes, added in their order."""
    if ranks.world == 1:
        return sums
    own = torch.tensor([getattr(sums, f.name) for f in fields(LossSums)], dtype=torch.float64)
    rows = [LossSums(*row.tolist()) for row in ranks.gather_everywhere(own)]
    return reduce(add, rows)
