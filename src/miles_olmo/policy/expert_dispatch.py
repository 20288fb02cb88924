"""Routed experts that live on several processes: send each token to its experts, and back.

Plain torch: rows sorted by expert are exchanged with one all-to-all of uneven sizes, computed where
their experts are, and exchanged back. A token is sent once per expert it uses. A rank that
receives nothing, or sends everything to one rank, takes part with empty runs.

Both exchanges are nodes of the autograd graph whose backward is the opposite exchange, so in a
backward pass, recomputed blocks included, all ranks of a policy exchange in the same order. The
result goes through the same combination as without expert parallelism, and on a CPU (see
`numerics`) each row has the same bits.

Sizes are exchanged first and read on the host, once per layer and pass: all-to-all of any backend
needs them there.

Dimension legend: T tokens, K experts per token, E experts, R ranks of one policy, L experts of one
rank (E = R * L), S rows sent, N rows received, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from olmo_core.nn.moe.v2.routed_experts import RoutedExperts

from miles_olmo.policy.experts import combine_experts, expert_rows
from miles_olmo.policy.ranks import Ranks


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; the gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, receive: list[int], send: list[int], ranks: Ranks
    ) -> torch.Tensor:
        ctx.receive, ctx.send, ctx.ranks = receive, send, ranks
        return ranks.exchange(rows, receive, send)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.ranks.exchange(gradients[0], ctx.send, ctx.receive), None, None, None


def dispatched_experts_forward(
    experts: RoutedExperts,
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    indices_TK: torch.Tensor,
    counts_E: torch.Tensor,
    *,
    min_rows: int,
    ranks: Ranks,
) -> torch.Tensor:
    """`routed_experts_forward` where `experts` holds only this rank's experts.

    Returns:
        `[T, D]` in the dtype of x.
    """
    num_tokens, top_k = indices_TK.shape
    num_local = counts_E.numel() // ranks.expert
    order_S = torch.argsort(indices_TK.reshape(-1), stable=True)
    sent_RL = counts_E.long().view(ranks.expert, num_local)
    received_RL = ranks.exchange(sent_RL, [1] * ranks.expert, [1] * ranks.expert)
    send, receive = torch.stack([sent_RL.sum(1), received_RL.sum(1)]).tolist()

    sent_SD = x_TD.index_select(0, order_S // top_k)
    rows_ND = _Exchange.apply(sent_SD, receive, send, ranks)
    local_N = torch.arange(num_local, device=x_TD.device).repeat(ranks.expert)
    local_N = local_N.repeat_interleave(received_RL.reshape(-1), output_size=sum(receive))
    out_ND = rows_ND  # nothing arrived: products of no rows have no backward, the exchange does
    if sum(receive):
        counts_L = received_RL.sum(0)
        out_ND = expert_rows(experts, rows_ND, local_N[:, None], counts_L, min_rows=min_rows)[:, 0]
    out_SD = _Exchange.apply(out_ND, send, receive, ranks)

    position_S = torch.empty_like(order_S)
    position_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    out_TKD = out_SD.index_select(0, position_S).view(num_tokens, top_k, -1)
    return combine_experts(out_TKD, weights_TK, x_TD.dtype)
