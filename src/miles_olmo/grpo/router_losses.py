"""Auxiliary losses of the routers over one update's packs.

Formulas and normalisers are those of `miles_olmo.algo.router_losses`. Statistics over the whole batch
are needed before its first pack: with replay they follow from the recorded routes, without it from
a counting pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import nn

from miles_olmo.algo.router_losses import RouterCounts, load_balancing_loss, z_loss
from miles_olmo.grpo.shares import EMPTY, BatchShare
from miles_olmo.manifest.models import AuxiliaryLoss, Train
from miles_olmo.policy.family import FamilyAdapter, RouterStatistics
from miles_olmo.policy.ranks import Ranks

LOAD_BALANCING = "train/load_balancing_loss"
Z = "train/z_loss"


@dataclass
class RouterLosses:
    """What each pack adds to the loss, and the sums for the metrics."""

    train: Train
    counts: RouterCounts | None
    """Of the batch; None when both losses are off."""
    totals: dict[str, float] = field(default_factory=dict)

    @classmethod
    def for_batch(
        cls,
        adapter: FamilyAdapter,
        module: nn.Module,
        share: BatchShare,
        train: Train,
        ranks: Ranks,
    ) -> RouterLosses:
        """The routes of the GLOBAL batch, counted if any loss needs them."""
        if train.load_balancing_loss.mode == "off" and train.z_loss.mode == "off":
            return cls(train, None)
        if share.route_counts is not None:
            return cls(train, share.route_counts)
        counts = [
            adapter.count_experts(module, [pack]) if pack else _no_counts(adapter, module)
            for pack in share.passes()
        ]
        return cls(train, counts_of_ranks(reduce(add, counts), ranks))

    def of_pack(self, statistics: RouterStatistics) -> torch.Tensor | float:
        """This pack's share of the weighted auxiliary losses; 0.0 when they are off."""
        if self.counts is None:
            return 0.0
        total: torch.Tensor | float = 0.0
        balancing, z = self.train.load_balancing_loss, self.train.z_loss
        if balancing.mode != "off":
            value = load_balancing_loss(statistics, self.counts, balancing.mode)
            self._count(LOAD_BALANCING, value)
            total = total + balancing.coefficient * value
        if z.mode != "off":
            value = z_loss(statistics, self.counts.num_positions)
            self._count(Z, value)
            total = total + z.coefficient * value
        return total

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """The unweighted losses of the global batch."""
        if self.counts is None or ranks.world == 1:
            return dict(self.totals)
        names = [name for name, loss in self._losses() if loss.mode != "off"]
        own = torch.tensor([self.totals.get(name, 0.0) for name in names], dtype=torch.float64)
        return dict(
            zip(names, torch.stack(ranks.gather_everywhere(own)).sum(0).tolist(), strict=True)
        )

    def _losses(self) -> Iterator[tuple[str, AuxiliaryLoss]]:
        yield LOAD_BALANCING, self.train.load_balancing_loss
        yield Z, self.train.z_loss

    def _count(self, name: str, value: torch.Tensor) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value.item()


def counts_of_ranks(counts: RouterCounts, ranks: Ranks) -> RouterCounts:
    """The counts of all processes, added up."""
    if ranks.world == 1:
        return counts
    counts_LE = torch.stack(ranks.gather_everywhere(counts.counts_LE)).sum(0)
    positions = ranks.gather_everywhere(torch.tensor([counts.num_positions]))
    return RouterCounts(counts_LE, int(torch.cat(positions).sum()))


def _no_counts(adapter: FamilyAdapter, module: nn.Module) -> RouterCounts:
    """Take part in a counting pass without a pack of one's own."""
    device = next(module.parameters()).device
    counts = adapter.count_experts(module, [EMPTY.to(device)])
    return RouterCounts(torch.zeros_like(counts.counts_LE), 0)
