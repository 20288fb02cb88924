"""What the rest of the system asks of a model family.

One adapter per family. Everything that knows OLMo-core's classes or a family's tensor names is
behind this protocol, so that the loop, publication and checkpoints are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from miles_olmo.algo.pack import Pack
from miles_olmo.algo.router_losses import RouterCounts
from miles_olmo.manifest.models import Model, Train
from miles_olmo.policy.export_tokenizer import TokenizerSource
from miles_olmo.policy.ranks import ALONE, Ranks


@dataclass(frozen=True)
class RouterStatistics:
    """How the routers of one forward pass behaved; sums, so that packs can be added up.

    L routed layers, E experts. Counted positions are tokens that are the input of another: those
    whose routing was replayed, or all of them without replay.
    """

    counts_LE: torch.Tensor
    """Times each expert was used, float32, no gradient [L, E]."""
    probability_sums_LE: torch.Tensor
    """Sum of normalised router scores over counted positions, float32, with gradient [L, E]."""
    z_sums_L: torch.Tensor
    """Sum of squared logsumexp of the router logits, float32, with gradient [L]."""
    num_positions: int
    """Counted positions."""
    num_required: int
    """Positions whose route the loss depends on: all but the last token of each document."""
    num_replayed: int
    """Required positions whose recorded route was used."""
    native_mismatch_L: torch.Tensor
    """Replayed positions whose native top-k set differs from the recorded one, int64 [L]."""


@dataclass(frozen=True)
class PackOutput:
    """Result of one forward pass over a pack."""

    logprobs_T: torch.Tensor
    """log p(ids[t] | document so far), float32, with gradient [T]; 0 outside mask_T."""
    entropy_T: torch.Tensor
    """Entropy of the tempered distribution in nats, float32, no gradient [T]; 0 outside mask_T."""
    router: RouterStatistics


class FamilyAdapter(Protocol):
    """One model family."""

    name: str
    """As in `model.family`."""

    def build(
        self,
        model: Model,
        train: Train | None,
        *,
        device: torch.device,
        seed: int,
        ranks: Ranks = ALONE,
    ) -> nn.Module:
        """A policy with seeded random weights; `train` (recompute, replay) is None for an engine.

        Args:
            ranks: Processes that the routed experts are spread over. A policy that is spread has
                `expert_shards` (see `miles_olmo.policy.expert_shards`); its passes, and the methods
                below that say so, need all of its ranks, each calling the same methods in order.
        """
        ...

    def forward(self, module: nn.Module, pack: Pack, *, temperature: float) -> PackOutput:
        """Logprobs of a pack, through the recorded routes where the pack has them."""
        ...

    def publication_tensors(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the policy once, under its Hugging Face name, buffers included.

        Of a policy that is spread, all ranks call this and run it to its end: the leader gets
        whole tensors, one layer's experts gathered at a time, the others nothing.
        """
        ...

    def publication_layout(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Names, shapes and dtypes of `publication_tensors`, on the meta device; any rank alone."""
        ...

    def load_tensors(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """Inverse of `publication_tensors`; all names, shapes and dtypes are checked first."""
        ...

    def count_experts(self, module: nn.Module, packs: Iterable[Pack]) -> RouterCounts:
        """Expert counts of a global batch without gradient, for global losses without replay."""
        ...

    def logits(self, module: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
        """Logits of every position `[B, T, V]`, natively routed, without gradient."""
        ...

    def float32_twin(
        self, module: nn.Module, model: Model, tensors: Mapping[str, torch.Tensor]
    ) -> nn.Module:
        """The policy with the same weights in float32, on this process alone; the module itself if that
        is its dtype."""
        ...

    def export(
        self,
        module: nn.Module,
        model: Model,
        tokenizer: TokenizerSource,
        directory: Path,
        *,
        plan_digest: str | None,
        step: int | None,
    ) -> dict[str, Any]:
        """Write a Hugging Face checkpoint, check its logits against the module, return the figures."""
        ...

    def assist_export(self, module: nn.Module, model: Model) -> None:
        """What the other ranks of a spread policy do while the leader calls `export`."""
        ...
