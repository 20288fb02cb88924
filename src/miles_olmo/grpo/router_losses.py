"""Auxiliary losses of the routers over one update's packs.

Formulas and normalisers are those of `miles_olmo.algo.router_losses`. Statistics over the whole batch
are needed before its first pack: with replay they follow from the recorded routes, without it from
a counting pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import nn

from miles_olmo.algo.pack import Pack
from miles_olmo.algo.router_losses import (
    RouterCounts,
    counts_of_routes,
    load_balancing_loss,
    z_loss,
)
from miles_olmo.manifest.models import ModelShape, Train
from miles_olmo.policy.family import FamilyAdapter, RouterStatistics


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
        packs: Sequence[Pack],
        train: Train,
        shape: ModelShape,
    ) -> RouterLosses:
        """Count the batch's routes, if any loss needs them."""
        if train.load_balancing_loss.mode == "off" and train.z_loss.mode == "off":
            return cls(train, None)
        routes = [pack.routes_TLK for pack in packs if pack.routes_TLK is not None]
        if len(routes) == len(packs):
            layers, num_experts = list(shape.routed_layers), shape.num_experts
            counts = (counts_of_routes(r[:, layers], num_experts) for r in routes)
            return cls(train, reduce(add, counts))
        return cls(train, adapter.count_experts(module, packs))

    def of_pack(self, statistics: RouterStatistics) -> torch.Tensor | float:
        """This pack's share of the weighted auxiliary losses; 0.0 when they are off."""
        if self.counts is None:
            return 0.0
        total: torch.Tensor | float = 0.0
        balancing, z = self.train.load_balancing_loss, self.train.z_loss
        if balancing.mode != "off":
            value = load_balancing_loss(statistics, self.counts, balancing.mode)
            self._count("train/load_balancing_loss", value)
            total = total + balancing.coefficient * value
        if z.mode != "off":
            value = z_loss(statistics, self.counts.num_positions)
            self._count("train/z_loss", value)
            total = total + z.coefficient * value
        return total

    def metrics(self) -> dict[str, float]:
        """The unweighted losses of the batch."""
        return dict(self.totals)

    def _count(self, name: str, value: torch.Tensor) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value.item()
