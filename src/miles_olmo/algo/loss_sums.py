"""Sums over trained tokens that add up over packs, microbatches and ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True)
class LossSums:
    """Detached sums of one or more packs; `+` joins them. Plain floats, so they serialise."""

    num_tokens: float = 0.0
    """Trained tokens."""
    loss: float = 0.0
    """Share of the batch's loss (already normalised): policy gradient plus weighted KL."""
    pg_loss: float = 0.0
    """Share of the policy-gradient term (already normalised)."""
    kl_loss: float = 0.0
    """Share of the KL penalty (already normalised), before its coefficient."""
    clipped_low: float = 0.0
    """Tokens stopped by the lower clip."""
    clipped_high: float = 0.0
    """Tokens stopped by the upper clip."""
    clipped_dual: float = 0.0
    """Tokens stopped by the dual clip."""
    ratio: float = 0.0
    """Sum of current / old."""
    ppo_kl: float = 0.0
    """Sum of log old - log current."""
    drift: float = 0.0
    """Sum of current / behaviour."""
    drift_squared: float = 0.0
    """Sum of its square, for the effective sample size."""
    entropy: float = 0.0
    """Sum of entropies in nats."""
    tis_weight: float = 0.0
    """Sum of TIS weights after the cap; the number of tokens when TIS is off."""
    tis_clipped: float = 0.0
    """Tokens whose TIS weight was capped."""
    train_rollout_kl: float = 0.0
    """Sum of k3 estimates of KL(engine || trainer)."""
    abs_difference: float = 0.0
    """Sum of |logp trainer - logp engine|."""
    abs_difference_max: float = 0.0
    """Largest |logp trainer - logp engine|; joined by maximum."""

    @classmethod
    def from_tensors(cls, **values: torch.Tensor) -> LossSums:
        """Reduce tensors [N] (or scalars) to their sums, `abs_difference_max` to its maximum.

        Sums are taken in float64 and moved to the host at once.
        """
        assert values.keys() == {field.name for field in fields(cls)}
        reduced = [
            _maximum(value) if name == "abs_difference_max" else value.double().sum()
            for name, value in values.items()
        ]
        return cls(**dict(zip(values, torch.stack(reduced).tolist(), strict=True)))

    def __add__(self, other: LossSums) -> LossSums:
        joined = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in fields(self)
        }
        joined["abs_difference_max"] = max(self.abs_difference_max, other.abs_difference_max)
        return LossSums(**joined)


def _maximum(value: torch.Tensor) -> torch.Tensor:
    return value.double().max() if value.numel() else value.new_zeros((), dtype=torch.float64)
