"""Which tensors of a policy are spread over processes, and how they become whole again.

A routed layer's expert tensors `[E, ...]` are cut along their first dimension into equal runs of
experts, one for each rank of `Ranks.expert_group`. Everything else is whole on every rank.

Memory: joining takes one whole tensor (all experts of one projection of one layer) on the leader at
a time, beside what its caller keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from miles_olmo.policy.ranks import Ranks


@dataclass(frozen=True)
class ExpertShards:
    """The cut tensors of one policy on one rank."""

    ranks: Ranks
    names: frozenset[str]
    """Names in the module's state whose first dimension is cut."""

    def is_cut(self, name: str) -> bool:
        return name in self.names

    def whole_layout(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor without memory, of the shape and dtype that `tensor` has when whole."""
        degree = self.ranks.expert if self.is_cut(name) else 1
        return torch.empty(
            (tensor.shape[0] * degree, *tensor.shape[1:]) if tensor.ndim else (),
            dtype=tensor.dtype,
            device="meta",
        )

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """The whole tensor on the leader, None elsewhere; all ranks call this in the same order."""
        if not self.is_cut(name):
            return tensor if self.ranks.is_leader else None
        return self.ranks.gather_shards(tensor)

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor; a view of it."""
        if not self.is_cut(name):
            return whole
        return whole.chunk(self.ranks.expert)[self.ranks.expert_index]


def shards_of(module: nn.Module) -> ExpertShards | None:
    """How a policy is spread over processes; None when each process holds all of it."""
    return getattr(module, "expert_shards", None)
