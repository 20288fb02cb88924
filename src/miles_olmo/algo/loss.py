"""The policy-gradient loss of one pack.

Variant: PPO's clipped surrogate (arXiv 1707.06347) per token with one advantage per answer, as in
GRPO (arXiv 2402.03300), and
- separate clip bounds, "clip higher" (DAPO, arXiv 2503.14476);
- optional dual clip for negative advantages (Ye et al. 2020, arXiv 1912.09729);
- optional KL penalty against a reference inside the loss (GRPO), see `miles_olmo.algo.kl`;
- optional truncated importance sampling between trainer and engine, TIS (Yao et al. 2025, "Your
  efficient RL framework secretly brings you off-policy RL training"): the policy-gradient term of a
  token is multiplied by min(exp(old - behaviour), cap), without gradient. It needs the trainer's own
  `old_logprobs_T`: with the behaviour logprobs in their place the weight would always be 1;
- aggregation over the global batch, see `miles_olmo.algo.normaliser`.

Three policies: behaviour (the engine), old (proximal, where the step began), current.
Left out: an entropy bonus, sequence-level ratios (GSPO), rejection (IcePop, MIS).
Log-ratios are cut at +-20 before exp.

Dimension legend: T tokens of the pack, N its trained tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_olmo.algo.kl import MAX_LOG_RATIO, kl_estimate
from miles_olmo.algo.loss_sums import LossSums
from miles_olmo.algo.normaliser import LossNormaliser
from miles_olmo.algo.pack import Pack
from miles_olmo.base.errors import TrainingError
from miles_olmo.manifest.models import Algorithm, Clip


@dataclass(frozen=True)
class _Tokens:
    """The trained tokens of a pack, each tensor float32 [N]."""

    logprobs: torch.Tensor
    """Current policy, with gradient."""
    old: torch.Tensor
    """Proximal policy."""
    behaviour: torch.Tensor
    """Engine."""
    trainer: torch.Tensor
    """The trainer's logprobs to compare with the engine's: old if it was computed, else current."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """Share of each token in the batch's loss."""


@dataclass(frozen=True)
class _Surrogate:
    """The clipped surrogate, [N] each."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped_low: torch.Tensor
    clipped_high: torch.Tensor
    clipped_dual: torch.Tensor


def policy_loss(
    pack: Pack,
    logprobs_T: torch.Tensor,
    settings: Algorithm,
    normaliser: LossNormaliser,
    *,
    entropy_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, LossSums]:
    """This pack's share of the batch's loss; the shares of all packs add up.

    Args:
        logprobs_T: Logprobs of the current policy, float32 with gradient [T]; read where mask_T.
        entropy_T: Entropy in nats, float32 [T], for the metrics only.

    Returns:
        A float32 scalar with gradient, and detached sums for the metrics.

    Raises:
        TrainingError: E314 if the pack lacks logprobs that the settings need; E315 if a token's
            loss is NaN or infinite (details: `sequences`, their indices in the global batch).
    """
    _require_inputs(pack, settings)
    tokens = _trained_tokens(pack, logprobs_T, settings, normaliser)
    surrogate = _clipped_surrogate(tokens, settings.clip)
    tis_N = _engine_weights(tokens, settings)
    pg_N = surrogate.loss * tis_N.clamp(max=settings.importance_sampling.cap)
    kl_N = torch.zeros_like(pg_N)
    if settings.kl.coefficient > 0:
        assert pack.reference_logprobs_T is not None
        reference_N = pack.reference_logprobs_T[pack.mask_T]
        kl_N = kl_estimate(tokens.logprobs, reference_N, settings.kl.estimator)
    token_loss_N = pg_N + settings.kl.coefficient * kl_N
    _require_finite(pack, token_loss_N)
    loss = (tokens.weights * token_loss_N).sum()
    entropy_N = torch.zeros_like(pg_N) if entropy_T is None else entropy_T[pack.mask_T]
    sums = _sums(tokens, surrogate, tis_N, pg_N, kl_N, entropy_N, settings)
    return loss, sums


def _trained_tokens(
    pack: Pack, logprobs_T: torch.Tensor, settings: Algorithm, normaliser: LossNormaliser
) -> _Tokens:
    mask_T = pack.mask_T
    logprobs_N = logprobs_T[mask_T]
    behaviour_N = pack.behaviour_logprobs_T[mask_T]
    old_N = None if pack.old_logprobs_T is None else pack.old_logprobs_T[mask_T]
    return _Tokens(
        logprobs=logprobs_N,
        old=behaviour_N if old_N is None else old_N,
        behaviour=behaviour_N,
        trainer=logprobs_N.detach() if old_N is None else old_N,
        advantages=pack.advantages_T[mask_T],
        weights=normaliser.weights_T(pack, settings.aggregation)[mask_T],
    )


def _clipped_surrogate(tokens: _Tokens, clip: Clip) -> _Surrogate:
    """max(-A r, -A clip(r)), and at most dual * |A| where A < 0."""
    advantages_N = tokens.advantages
    ratio_N = _ratio(tokens.logprobs, tokens.old)
    bounded_N = ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high)
    loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * bounded_N)
    clipped_dual_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    if clip.dual is not None:
        bound_N = -advantages_N * clip.dual
        clipped_dual_N = (advantages_N < 0) & (loss_N > bound_N)
        loss_N = torch.where(clipped_dual_N, bound_N, loss_N)
    return _Surrogate(
        loss=loss_N,
        ratio=ratio_N.detach(),
        clipped_low=(advantages_N < 0) & (ratio_N < 1.0 - clip.low),
        clipped_high=(advantages_N > 0) & (ratio_N > 1.0 + clip.high),
        clipped_dual=clipped_dual_N,
    )


def _engine_weights(tokens: _Tokens, settings: Algorithm) -> torch.Tensor:
    """TIS weights before the cap, [N], no gradient; 1 when switched off."""
    if not settings.importance_sampling.enabled:
        return torch.ones_like(tokens.behaviour)
    return _ratio(tokens.trainer, tokens.behaviour).detach()


def _ratio(logprobs_N: torch.Tensor, other_logprobs_N: torch.Tensor) -> torch.Tensor:
    return (logprobs_N - other_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _sums(
    tokens: _Tokens,
    surrogate: _Surrogate,
    tis_N: torch.Tensor,
    pg_N: torch.Tensor,
    kl_N: torch.Tensor,
    entropy_N: torch.Tensor,
    settings: Algorithm,
) -> LossSums:
    with torch.no_grad():
        cap = settings.importance_sampling.cap
        current_N = tokens.logprobs.detach()
        drift_N = _ratio(current_N, tokens.behaviour)
        difference_N = (tokens.trainer - tokens.behaviour).abs()
        pg_loss = (tokens.weights * pg_N).sum()
        kl_loss = (tokens.weights * kl_N).sum()
        return LossSums.from_tensors(
            num_tokens=torch.ones_like(pg_N),
            loss=pg_loss + settings.kl.coefficient * kl_loss,
            pg_loss=pg_loss,
            kl_loss=kl_loss,
            clipped_low=surrogate.clipped_low,
            clipped_high=surrogate.clipped_high,
            clipped_dual=surrogate.clipped_dual,
            ratio=surrogate.ratio,
            ppo_kl=tokens.old - current_N,
            drift=drift_N,
            drift_squared=drift_N.square(),
            entropy=entropy_N,
            tis_weight=tis_N.clamp(max=cap),
            tis_clipped=tis_N > cap,
            train_rollout_kl=kl_estimate(tokens.behaviour, tokens.trainer, "k3"),
            abs_difference=difference_N,
            abs_difference_max=difference_N,
        )


def _require_inputs(pack: Pack, settings: Algorithm) -> None:
    missing = ""
    if settings.importance_sampling.enabled and pack.old_logprobs_T is None:
        missing = "algorithm.importance_sampling.enabled = true needs old_logprobs_T"
    elif settings.kl.coefficient > 0 and pack.reference_logprobs_T is None:
        missing = f"algorithm.kl.coefficient = {settings.kl.coefficient} needs reference_logprobs_T"
    if missing:
        raise TrainingError(
            "E314",
            f"{missing}, and the pack has none",
            why="the term would silently be left out of the loss",
            fix="compute these logprobs with the trainer before the first update of the step",
        )


def _require_finite(pack: Pack, token_loss_N: torch.Tensor) -> None:
    finite_N = torch.isfinite(token_loss_N.detach())
    if bool(finite_N.all()):
        return
    lengths_D = torch.tensor(pack.document_lengths, device=pack.mask_T.device)
    documents_T = torch.arange(len(lengths_D), device=lengths_D.device).repeat_interleave(lengths_D)
    bad = documents_T[pack.mask_T][~finite_N].unique().tolist()
    sequences = [pack.sequence_indices[document] for document in bad]
    raise TrainingError(
        "E315",
        f"the loss is NaN or infinite in sequences {sequences} of the batch",
        why="an update with it would destroy the policy",
        fix="look at these samples; lower train.optimizer.learning_rate or max_grad_norm and resume",
        sequences=sequences,
    )
