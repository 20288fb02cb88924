"""Routed experts without TransformerEngine: sort by expert, grouped products, combine in float32.

Dimension legend: T tokens, K experts per token, E experts, P rows sent to experts, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from olmo_core.nn.moe.v2.routed_experts import RoutedExperts


def routed_experts_forward(
    experts: RoutedExperts,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices_TK: torch.Tensor,
    counts_E: torch.Tensor,
    *,
    min_rows: int,
) -> torch.Tensor:
    """Send each token to its experts and add up the weighted results.

    Groups of a used expert are padded to `min_rows` rows (see `numerics`); padding rows repeat token
    0 and are never read back, so their gradient is zero. Unused experts get no rows and no gradient.
    Weights are applied after the down-projection and summed in float32 with one rounding, as
    Hugging Face's `olmo3moe` does.

    Returns:
        `[T, D]` in the dtype of x.
    """
    out_TKD = expert_rows(experts, x_TD, indices_TK, counts_E, min_rows=min_rows)
    return combine_experts(out_TKD, weights_TK, x_TD.dtype)


def expert_rows(
    experts: RoutedExperts,
    x_TD: torch.Tensor,
    indices_TK: torch.Tensor,
    counts_E: torch.Tensor,
    *,
    min_rows: int,
) -> torch.Tensor:
    """What each expert of each token answers, `[T, K, D]`; see `routed_experts_forward`."""
    num_tokens, top_k = indices_TK.shape
    order = torch.argsort(indices_TK.reshape(-1), stable=True)
    source_P, slots, sizes_E = _expert_rows(order, counts_E, top_k, min_rows)
    slot_of_assignment = torch.empty_like(order)
    slot_of_assignment[order] = slots

    rows = _ToExperts.apply(x_TD, source_P, slot_of_assignment.view(num_tokens, top_k))
    offsets_E = torch.cumsum(sizes_E, 0, dtype=torch.int32)
    up_gate = F.grouped_mm(rows, experts.w_up_gate.transpose(1, 2), offs=offsets_E)
    hidden = experts.chunk_and_activate(up_gate)
    out_PD = F.grouped_mm(hidden, experts.w_down, offs=offsets_E)

    return out_PD.index_select(0, slot_of_assignment).view(num_tokens, top_k, -1)


class _ToExperts(torch.autograd.Function):
    """Copies tokens to the rows of their experts: `x[source_P]`.

    The gradient of a token is the sum over its own rows, gathered and added in float32. Gradients of
    padding rows are zero and are not read.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, source_P: torch.Tensor, slots_TK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(slots_TK)
        return x_TD.index_select(0, source_P)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (slots_TK,) = ctx.saved_tensors
        rows_PD = gradients[0]
        own = rows_PD.index_select(0, slots_TK.view(-1)).view(*slots_TK.shape, -1)
        return own.sum(dim=1), None, None  # 16-bit sums are taken in float32, rounded once


def combine_experts(
    out_TKD: torch.Tensor, weights_TK: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Weighted sum over a token's experts in float32, rounded once to `dtype`: `[T, D]`."""
    combined = (out_TKD.float() * weights_TK.float().unsqueeze(-1)).sum(1)
    return combined.to(dtype)


def _expert_rows(
    order: torch.Tensor, counts_E: torch.Tensor, top_k: int, min_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token of each expert row [P], row of each sorted assignment [T * K], rows per expert [E]."""
    if min_rows <= 1:
        return order // top_k, torch.arange(order.numel(), device=order.device), counts_E
    counts_E = counts_E.long()
    sizes_E = torch.where(counts_E > 0, counts_E.clamp(min=min_rows), 0)
    shift_E = (sizes_E - counts_E).cumsum(0) - (sizes_E - counts_E)
    slots = torch.arange(order.numel(), device=order.device)
    slots = slots + shift_E.repeat_interleave(counts_E, output_size=order.numel())
    source_P = order.new_zeros(int(sizes_E.sum()))
    source_P[slots] = order // top_k
    return source_P, slots, sizes_E
