"""Router replay: routes are an input of the forward pass, and what the routers did is an output.

Replay forces the experts; their weights are gathered from the LIVE scores, so that the router keeps
its gradient (R3, arXiv:2510.11370). Routes travel as an argument of each block. Recomputing a
block in the backward pass therefore sees the same routes, and nothing has to stay switched on.

Dimension legend: T rows of the pass, L layers (routed layers in statistics), E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from olmo_core.nn.moe.router import MoERouterGatingFunction
from olmo_core.nn.moe.v2.router import MoERouterConfigV2, MoERouterV2

from miles_olmo.policy.family import RouterStatistics


@dataclass(frozen=True)
class RoutingDecision:
    """What one router decided in one pass."""

    indices_TK: torch.Tensor
    """Experts used, int64."""
    native_TK: torch.Tensor
    """Experts that the router would have chosen by itself, int64."""
    scores_TE: torch.Tensor
    """Scores after the gating function, float32, with gradient."""
    logits_TE: torch.Tensor
    """Router logits, float32, with gradient."""


class RoutingObserver(Protocol):
    """Receives each layer's decision; called again for a layer whose block is recomputed."""

    def observe(self, layer: int, decision: RoutingDecision) -> None: ...


class ReplayRouter(MoERouterV2):
    """OLMo-core's router with the experts of chosen rows forced."""

    _forced_TK: torch.Tensor | None = None
    _native_TK: torch.Tensor | None = None

    def route(
        self, x_TD: torch.Tensor, forced_TK: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RoutingDecision]:
        """Choose experts; rows of `forced_TK` that are not -1 use these instead.

        Returns:
            (weights [T, K] float32, indices [T, K], counts [E], decision).
        """
        # `MoERouterV2.forward` has no argument for routes; it calls `get_top_k` below, inside this
        # call only.
        self._forced_TK = forced_TK
        try:
            weights_1TK, indices_1TK, counts_E, (scores, logits, *_) = self(x_TD[None], False)
        finally:
            self._forced_TK = None
        indices_TK = indices_1TK[0]
        native_1TK, self._native_TK = self._native_TK, None
        native_TK = indices_TK if native_1TK is None else native_1TK[0]
        decision = RoutingDecision(indices_TK, native_TK, scores[0], logits[0])
        return weights_1TK[0], indices_TK, counts_E, decision

    def get_top_k(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, native = super().get_top_k(scores)
        if self._forced_TK is None:
            return weights, native
        self._native_TK = native
        forced = self._forced_TK.view_as(native)
        indices = torch.where(forced >= 0, forced, native)
        return scores.gather(-1, indices), indices


@dataclass
class ReplayRouterConfig(MoERouterConfigV2):
    """Builds a `ReplayRouter`."""

    def build(self, init_device: str = "cpu") -> ReplayRouter:
        kwargs: dict[str, Any] = self.as_dict(exclude_none=True, recurse=False)
        if self.dtype is not None:
            kwargs["dtype"] = self.dtype.as_pt()
        return ReplayRouter(**kwargs, init_device=init_device)


class RouteRecorder:
    """Keeps the experts of each layer, for the engine; dense layers have all-zero rows."""

    def __init__(self, num_layers: int) -> None:
        self._indices: list[torch.Tensor | None] = [None] * num_layers

    def observe(self, layer: int, decision: RoutingDecision) -> None:
        self._indices[layer] = decision.indices_TK

    def routes_TLK(self) -> torch.Tensor:
        """Experts used, int64 [T, L, K] over all layers."""
        nothing = next(torch.zeros_like(i) for i in self._indices if i is not None)
        return torch.stack([nothing if i is None else i for i in self._indices], dim=1)


class StatisticsRecorder:
    """Sums what the routers did over the counted rows, for metrics and auxiliary losses."""

    def __init__(
        self,
        num_layers: int,
        gating: MoERouterGatingFunction,
        weights_T: torch.Tensor,
        replayed_T: torch.Tensor | None,
    ) -> None:
        """
        Args:
            num_layers: All layers; dense ones are never observed and have no statistics.
            gating: Sigmoid scores are normalised to sum to 1 before they are summed.
            weights_T: How many tokens each row counts for, float32 [T].
            replayed_T: Rows whose route is forced, bool [T]; None without replay.
        """
        self._gating = gating
        self._weights_T = weights_T
        self._replayed_T = replayed_T
        self._layers: list[tuple[torch.Tensor, ...] | None] = [None] * num_layers

    def observe(self, layer: int, decision: RoutingDecision) -> None:
        scores_TE = decision.scores_TE
        if self._gating == MoERouterGatingFunction.sigmoid:
            scores_TE = scores_TE / scores_TE.sum(dim=-1, keepdim=True)
        weights_T = self._weights_T
        probability_sums_E = weights_T @ scores_TE
        z_sum = weights_T @ decision.logits_TE.logsumexp(dim=-1).square()
        # A recomputed block must build the same graph again, but its sums were taken already.
        if self._layers[layer] is None:
            used_TE = torch.zeros_like(decision.logits_TE).scatter_(1, decision.indices_TK, 1.0)
            counts_E = weights_T @ used_TE  # selecting rows would wait for the device
            mismatch = self._count_mismatches(decision)
            self._layers[layer] = (counts_E, probability_sums_E, z_sum, mismatch)

    def _count_mismatches(self, decision: RoutingDecision) -> torch.Tensor:
        """Replayed tokens whose native set of experts differs from the recorded one, int64 scalar."""
        if self._replayed_T is None:
            return torch.zeros((), dtype=torch.int64, device=decision.indices_TK.device)
        differs_T = (
            decision.indices_TK.sort(dim=-1).values != decision.native_TK.sort(dim=-1).values
        ).any(dim=-1)
        return (self._weights_T * (differs_T & self._replayed_T)).sum().long()

    def statistics(
        self, *, num_positions: int, num_required: int, num_replayed: int
    ) -> RouterStatistics:
        """The sums of all layers."""
        counts, probabilities, z_sums, mismatches = zip(
            *[layer for layer in self._layers if layer is not None], strict=True
        )
        return RouterStatistics(
            counts_LE=torch.stack(counts),
            probability_sums_LE=torch.stack(probabilities),
            z_sums_L=torch.stack(z_sums),
            num_positions=num_positions,
            num_required=num_required,
            num_replayed=num_replayed,
            native_mismatch_L=torch.stack(mismatches),
        )
