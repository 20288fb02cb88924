"""One training step on scored groups: advantages, packs, loss, update.

GRPO in the variant that `miles_olmo.algo.advantages` and `miles_olmo.algo.loss` describe. Gradients of
all packs are added up before the optimizer runs, so the step does not depend on how the batch was
packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from miles_olmo.algo.loss import policy_loss
from miles_olmo.algo.loss_sums import LossSums
from miles_olmo.algo.metrics import training_metrics
from miles_olmo.algo.pack import Pack
from miles_olmo.base.errors import TrainingError
from miles_olmo.grpo.batch import UpdateBatch, groups_with_signal, split_evenly, update_batch
from miles_olmo.grpo.router_losses import RouterLosses
from miles_olmo.grpo.router_report import RouterTotals
from miles_olmo.manifest.models import Manifest
from miles_olmo.policy.family import FamilyAdapter, PackOutput
from miles_olmo.policy.optimizer import PolicyOptimizer
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
        batches = [self._scored(update_batch(part, self.manifest)) for part in parts]
        metrics = [self._update(batch, is_first=i == 0) for i, batch in enumerate(batches)]
        if not metrics:
            return {}
        means = {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}
        return {
            **means,
            LARGEST_DIFFERENCE: max(m[LARGEST_DIFFERENCE] for m in metrics),
            "train/num_groups": len(signal),
            "train/num_updates": self.optimizer.num_updates,
        }

    def _update(self, batch: UpdateBatch, *, is_first: bool) -> dict[str, float]:
        """One optimizer update."""
        train = self.manifest.train
        rate = learning_rate(
            self.optimizer.num_updates,
            train.optimizer.learning_rate,
            train.schedule,
            train.steps * train.updates_per_step,
        )
        router_losses = RouterLosses.for_batch(
            self.adapter,
            self.module,
            batch.packs,
            train,
            self.manifest.model.shape,
        )
        sums, router = LossSums(), RouterTotals()
        self.optimizer.zero_gradients()
        try:
            for pack in batch.packs:
                output = self._forward(self.module, pack)
                loss, pack_sums = policy_loss(
                    self._with_old_logprobs(pack, output, is_first=is_first),
                    output.logprobs_T,
                    self.manifest.algorithm,
                    batch.normaliser,
                    entropy_T=output.entropy_T,
                )
                (loss + router_losses.of_pack(output.router)).backward()
                sums += pack_sums
                router.add(output.router)
            norm = self.optimizer.step(rate)
        except TrainingError as error:
            raise with_sample_ids(error, batch) from error
        self._count_experts(router)
        num_tokens = sum(pack.num_tokens for pack in batch.packs)
        return {
            **training_metrics(sums),
            **router.metrics(),
            **router_losses.metrics(),
            "router/replay_coverage": batch.coverage.share,
            "train/grad_norm": norm,
            "train/learning_rate": rate,
            "train/num_packs": len(batch.packs),
            "train/num_tokens": num_tokens,
            "train/pack_fill": num_tokens / (len(batch.packs) * train.packing.max_tokens),
        }

    def _count_experts(self, router: RouterTotals) -> None:
        counts_LE, before_LE = router.counts_LE, self.expert_counts_LE
        assert counts_LE is not None, "an update has packs"
        self.expert_counts_LE = counts_LE if before_LE is None else before_LE + counts_LE

    def _forward(self, module: nn.Module, pack: Pack) -> PackOutput:
        return self.adapter.forward(module, pack, temperature=self.manifest.rollout.temperature)

    # Logprobs that the loss compares the current policy with.

    @torch.no_grad()
    def _scored(self, batch: UpdateBatch) -> UpdateBatch:
        """Score the packs with the reference, and with the policy at the start of the step.

        The second is skipped where the current forward gives the same numbers: see
        `_with_old_logprobs`.
        """
        packs = batch.packs
        if self.reference is not None:
            scores = [self._forward(self.reference, pack).logprobs_T for pack in packs]
            packs = [
                replace(pack, reference_logprobs_T=logprobs_T)
                for pack, logprobs_T in zip(packs, scores, strict=True)
            ]
        if self._needs_old_logprobs and self.manifest.train.updates_per_step > 1:
            packs = [
                replace(pack, old_logprobs_T=self._forward(self.module, pack).logprobs_T)
                for pack in packs
            ]
        return replace(batch, packs=tuple(packs))

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


def with_sample_ids(error: TrainingError, batch: UpdateBatch) -> TrainingError:
    """The same error, naming the samples of the sequences it is about (all if it names none)."""
    indices = error.details.get("sequences", range(len(batch.sequences)))
    samples = [batch.sequences[index].sample_id for index in indices]
    return TrainingError(
        error.code,
        f"{error.what} (samples {', '.join(samples[:8])}{', ...' if len(samples) > 8 else ''})",
        why=error.why,
        fix=error.fix,
        **{**error.details, "sample_ids": samples},
    )
