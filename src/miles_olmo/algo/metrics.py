"""The metric names users know, from the sums of a batch."""

from __future__ import annotations

from miles_olmo.algo.loss_sums import LossSums


def training_metrics(sums: LossSums) -> dict[str, float]:
    """`train/...` metrics of one update; token means over the global batch unless noted.

    `train/loss`, `pg_loss` and `kl_loss` follow the chosen aggregation. `ess_ratio` is the effective
    sample size of the weights current / behaviour as a share of the tokens,
    (sum w)^2 / (N sum w^2) (Kong 1992). `train_rollout_*` compare trainer and engine on the same
    tokens: the trainer's logprobs are those of the proximal policy where it was computed, else of
    the current one (then only a step's first update shows the mismatch alone).
    """
    tokens = sums.num_tokens
    assert tokens > 0, "a batch without trained tokens has no metrics"
    means = {
        "pg_clipfrac": sums.clipped_low + sums.clipped_high,
        "pg_clipfrac_low": sums.clipped_low,
        "pg_clipfrac_high": sums.clipped_high,
        "pg_clipfrac_dual": sums.clipped_dual,
        "ratio": sums.ratio,
        "ppo_kl": sums.ppo_kl,
        "entropy": sums.entropy,
        "tis": sums.tis_weight,
        "tis_clipfrac": sums.tis_clipped,
        "train_rollout_kl": sums.train_rollout_kl,
        "train_rollout_logprob_abs_diff": sums.abs_difference,
    }
    return {
        "train/loss": sums.loss,
        "train/pg_loss": sums.pg_loss,
        "train/kl_loss": sums.kl_loss,
        **{f"train/{name}": value / tokens for name, value in means.items()},
        "train/ess_ratio": sums.drift**2 / (tokens * sums.drift_squared),
        "train/train_rollout_logprob_abs_diff_max": sums.abs_difference_max,
    }
