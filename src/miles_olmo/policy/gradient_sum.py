"""Gradients of all packs, added up over the processes that trained them.

The loss of each pack is its share of the global batch's loss (`algo.normaliser`), so gradients are
SUMMED, never averaged:

- weights that every rank holds: over all ranks;
- experts: their rank already has the gradients of all tokens that its own replica sent there (the
  backward of the dispatch brought them), so over the ranks that hold the same experts.

Sums run in float32 over joined blocks of gradients; an all-reduce gives all ranks the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from miles_olmo.policy.expert_shards import ExpertShards
from miles_olmo.policy.ranks import Ranks

_BLOCK_VALUES = 16 * 1024 * 1024
"""Values of one all-reduce; a larger gradient has one of its own."""


@dataclass(frozen=True)
class GradientSum:
    """How the gradients of one policy are added up."""

    ranks: Ranks
    shards: ExpertShards | None

    def over_ranks(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add up gradients, float32, in place. Every rank has all names, in the same order."""
        if self.ranks.world == 1:
            return
        experts = [g for name, g in gradients.items() if self._is_cut(name)]
        others = [g for name, g in gradients.items() if not self._is_cut(name)]
        for block in _blocks(others):
            _reduce(block, self.ranks.sum_everywhere)
        if self.ranks.data > 1:
            for block in _blocks(experts):
                _reduce(block, self.ranks.sum_over_replicas)

    def squared_norms(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Square of each whole gradient's 2-norm, float64 scalars, equal on all ranks."""
        squares = {name: _squared_norm(gradient) for name, gradient in gradients.items()}
        cut = [name for name in squares if self._is_cut(name)]
        if cut:
            own = torch.stack([squares[name] for name in cut])
            total = torch.stack(self.ranks.gather_from_experts(own)).sum(0)
            squares.update(zip(cut, total, strict=True))
        return squares

    def _is_cut(self, name: str) -> bool:
        return self.shards is not None and self.shards.is_cut(name)


def _blocks(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    block: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if block and size + gradient.numel() > _BLOCK_VALUES:
            yield block
            block, size = [], 0
        block.append(gradient)
        size += gradient.numel()
    if block:
        yield block


def _reduce(block: list[torch.Tensor], add_up) -> None:
    joined = torch.cat([gradient.reshape(-1) for gradient in block])
    add_up(joined)
    for gradient, total in zip(block, joined.split([g.numel() for g in block]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
