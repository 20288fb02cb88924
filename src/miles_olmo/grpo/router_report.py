"""How the routers behaved over the packs of one update, as metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from miles_olmo.policy.family import RouterStatistics
from miles_olmo.policy.ranks import Ranks


@dataclass
class RouterTotals:
    """Sums over packs. L routed layers, E experts."""

    counts_LE: torch.Tensor | None = None
    native_mismatch_L: torch.Tensor | None = None
    num_required: int = 0
    num_replayed: int = 0

    def add(self, pack: RouterStatistics) -> None:
        """Add one pack."""
        mismatch_L, counts_LE = pack.native_mismatch_L, pack.counts_LE
        self.counts_LE = counts_LE if self.counts_LE is None else self.counts_LE + counts_LE
        self.native_mismatch_L = (
            mismatch_L if self.native_mismatch_L is None else self.native_mismatch_L + mismatch_L
        )
        self.num_required += pack.num_required
        self.num_replayed += pack.num_replayed

    def of_ranks(self, ranks: Ranks) -> RouterTotals:
        """The totals of all processes."""
        if ranks.world == 1:
            return self
        assert self.counts_LE is not None and self.native_mismatch_L is not None
        numbers = torch.tensor([self.num_required, self.num_replayed])
        required, replayed = torch.stack(ranks.gather_everywhere(numbers)).sum(0).tolist()
        return RouterTotals(
            torch.stack(ranks.gather_everywhere(self.counts_LE)).sum(0),
            torch.stack(ranks.gather_everywhere(self.native_mismatch_L)).sum(0),
            required,
            replayed,
        )

    def metrics(self) -> dict[str, float]:
        """`router/...` metrics.

        Load is relative to an expert's uniform share, `load_e * E / (T * K)`: 1 when balanced; the
        least loaded expert is watched over the whole step, in `collapse_alarm`.
        `replay_applied` is the share of required positions whose recorded route was used;
        `native_mismatch` the share of replayed positions and layers whose native choice would have
        been another set of experts.
        """
        assert self.counts_LE is not None and self.native_mismatch_L is not None
        num_layers, num_experts = self.counts_LE.shape
        total_L1 = self.counts_LE.sum(1, keepdim=True).clamp(min=1)
        share_LE = self.counts_LE * num_experts / total_L1
        compared = max(self.num_replayed * num_layers, 1)
        return {
            "router/load_imbalance": float(share_LE.max(1).values.mean()),
            "router/replay_applied": self.num_replayed / max(self.num_required, 1),
            "router/native_mismatch": float(self.native_mismatch_L.sum()) / compared,
        }


def without_counts(statistics: RouterStatistics) -> RouterStatistics:
    """Statistics of the same shape in which nothing was counted."""
    return replace(
        statistics,
        counts_LE=torch.zeros_like(statistics.counts_LE),
        native_mismatch_L=torch.zeros_like(statistics.native_mismatch_L),
        num_positions=0,
        num_required=0,
        num_replayed=0,
    )
