"""Auxiliary losses of the routers, per pack or over the global batch.

Variant: the load-balancing loss of Switch Transformer (arXiv:2101.03961, eq. 4) for top-k as in
OLMoE (arXiv:2409.02060): E * sum_e f_e * P_e, where f_e is expert e's share of all assignments (1/E
when balanced, so that the loss is then 1) and P_e the mean normalised score; averaged over layers.
The z-loss is the mean squared logsumexp of the router logits (ST-MoE, arXiv:2202.08906, eq. 5).
Left out: per-document balancing, and balancing by score biases.

One normaliser: N, the counted positions of the GLOBAL batch. Every pack's contribution divides by
it, so contributions add up over packs and processes, and each can be backpropagated by itself:

    global     sum over packs of  E * sum_e F_e * (sum_t p_te) / N     F_e from the whole batch
    per_pack   sum over packs of  n_pack / N * E * sum_e f_e * (sum_t p_te) / n_pack

`global` does not depend on how the batch is packed; `per_pack` does, by definition.

Dimension legend: L routed layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from miles_olmo.policy.family import RouterStatistics

Scope = Literal["per_pack", "global"]


@dataclass(frozen=True)
class RouterCounts:
    """How often each expert was used in a global batch."""

    counts_LE: torch.Tensor
    """Assignments per layer and expert, float32."""
    num_positions: int
    """Counted positions, N."""

    def __add__(self, other: RouterCounts) -> RouterCounts:
        return RouterCounts(
            self.counts_LE + other.counts_LE, self.num_positions + other.num_positions
        )


def counts_of_routes(routes_TLK: torch.Tensor, num_experts: int) -> RouterCounts:
    """Counts of a pack that is replayed, before any forward pass.

    Args:
        routes_TLK: Recorded experts of the routed layers, int64 [T, L, K]; a row with any -1 is not
            counted.
        num_experts: Experts per layer.
    """
    recorded_TLK = routes_TLK[(routes_TLK >= 0).all(dim=-1).all(dim=-1)]
    counts = [
        torch.bincount(layer.reshape(-1), minlength=num_experts)
        for layer in recorded_TLK.transpose(0, 1)
    ]
    return RouterCounts(torch.stack(counts).float(), len(recorded_TLK))


def load_balancing_loss(
    statistics: RouterStatistics, batch: RouterCounts, scope: Scope
) -> torch.Tensor:
    """One pack's contribution to the load-balancing loss of the batch, float32 scalar.

    Args:
        statistics: Of the pack.
        batch: Counts of the global batch; only its `num_positions` is used when per_pack.
        scope: Whose assignment shares are used, the pack's or the batch's.
    """
    counts_LE = batch.counts_LE if scope == "global" else statistics.counts_LE
    shares_LE = counts_LE / counts_LE.sum(dim=-1, keepdim=True).clamp(min=1)
    means_LE = statistics.probability_sums_LE / max(batch.num_positions, 1)
    num_experts = shares_LE.shape[-1]
    return num_experts * (shares_LE * means_LE).sum(dim=-1).mean()


def z_loss(statistics: RouterStatistics, num_positions: int) -> torch.Tensor:
    """One pack's contribution to the z-loss of the batch, float32 scalar.

    It is linear in the positions, so per pack (weighted by its share) and global are the same.

    Args:
        statistics: Of the pack.
        num_positions: Counted positions of the global batch.
    """
    return statistics.z_sums_L.mean() / max(num_positions, 1)
