"""Causal attention inside documents, for packs and for decoding against a cache.

A pass computes rows; documents are made of rows, and several may hold the same one (`pack_rows`).

Dimension legend: T rows of the pass, I positions of all documents, N documents of one padded length,
P that length, H query heads, G key/value heads, D width of a head, R rows of queries per sequence, C
cached positions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from miles_olmo.policy.numerics import NumericRules


@dataclass(frozen=True)
class DocumentGroup:
    """The documents of a pack that share one padded length."""

    num_documents: int
    padded_length: int
    rows_NP: torch.Tensor
    """Row of every padded position, flat int64 [N * P]; padding repeats the first row."""


@dataclass(frozen=True)
class DocumentLayout:
    """Where the documents of a pass are, and how they are gathered for attention."""

    positions_T: torch.Tensor
    """Position of each row in its documents, int64 [T]."""
    groups: tuple[DocumentGroup, ...]
    """None of them with a kernel that takes documents of any length."""
    rows_I: torch.Tensor | None
    """Row of every position of every document, int64 [I]; None where these are the rows in order."""
    restore_T: torch.Tensor
    """Where a row's output is: in the groups' concatenated outputs, or in [I]; int64 [T]."""
    bounds_D1: torch.Tensor
    """First position of each of the D documents and the end of the last, int32 [D + 1]."""
    longest: int
    """Positions of the longest document."""


def lay_out(
    document_lengths: Sequence[int],
    rules: NumericRules,
    device: torch.device,
    rows: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> DocumentLayout:
    """Group documents by padded length, so that each group is one attention call.

    Args:
        document_lengths: Tokens of each document.
        rows: Row of each token and first token of each row, as `pack_rows` gives them; the last
            token of each document has no row. None: every token is a row.
    """
    dropped = 0 if rows is None else 1
    documents: list[tuple[int, int]] = []
    start = 0
    for length in document_lengths:
        if length > dropped:
            documents.append((start, length - dropped))
        start += length
    tokens = [token for first, length in documents for token in range(first, first + length)]
    positions, places = [0] * start, [0] * start
    for first, length in documents:
        positions[first : first + length] = range(length)
    by_length: dict[int, list[tuple[int, int]]] = defaultdict(list)
    if rules.attention == "varlen":
        for place, token in enumerate(tokens):
            places[token] = place
    else:
        for first, length in documents:
            by_length[rules.padded(length)].append((first, length))
    groups, offset = [], 0
    for padded_length, members in sorted(by_length.items()):
        padded: list[int] = []
        for first, length in members:
            places[first : first + length] = range(offset, offset + length)
            padded.extend(range(first, first + length))
            padded.extend([first] * (padded_length - length))
            offset += padded_length
        tokens_NP = torch.tensor(padded, device=device)
        rows_NP = tokens_NP if rows is None else rows[0][tokens_NP]
        groups.append(DocumentGroup(len(members), padded_length, rows_NP))
    rows_I, position_T, place_T = None, torch.tensor(positions), torch.tensor(places)
    position_T, place_T = position_T.to(device), place_T.to(device)
    if rows is not None:
        row_T, token_R = rows
        if len(tokens) != len(token_R):
            rows_I = row_T[torch.tensor(tokens, device=device)]
        position_T, place_T = position_T[token_R], place_T[token_R]
    return DocumentLayout(
        positions_T=position_T,
        groups=tuple(groups),
        rows_I=rows_I,
        restore_T=place_T,
        bounds_D1=torch.tensor(
            [0, *accumulate(length for _, length in documents)], dtype=torch.int32, device=device
        ),
        longest=max(length for _, length in documents),
    )


def attend_documents(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: DocumentLayout,
    rules: NumericRules,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of every document of a pack to itself.

    Args:
        window: Positions a query sees, its own included; None for all up to it. Keys outside it are
            masked, not skipped: sums run over the same blocks as without a window.

    Returns:
        The attended values `[T, H * D]`, in the dtype of the queries.
    """
    if rules.attention == "varlen":
        return attend_varlen(q_THD, k_TGD, v_TGD, layout, window)
    width = q_THD.shape[1] * q_THD.shape[2]
    outputs = []
    for group in layout.groups:
        shape = (group.num_documents, group.padded_length)
        q, k, v = (
            gather_rows(x, group.rows_NP).view(*shape, *x.shape[1:]).transpose(1, 2)
            for x in (q_THD, k_TGD, v_TGD)
        )
        if rules.attention == "blocked":
            mask_PP = _causal_bias(group.padded_length, q_THD.dtype, window)
            out = attend_blocked(q, k, v, mask_PP, rules.key_block)
        elif window is not None and window < group.padded_length:
            visible_PP = _window(group.padded_length, window, q_THD.device)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible_PP, enable_gqa=q.shape[1] != k.shape[1]
            )
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        outputs.append(out.transpose(1, 2).reshape(-1, width))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return padded.index_select(0, layout.restore_T)


def attend_varlen(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    layout: DocumentLayout,
    window: int | None = None,
) -> torch.Tensor:
    """`attend_documents` as one FlashAttention call (torch's own kernel; 16-bit, CUDA)."""
    from torch.nn.attention.varlen import varlen_attn

    if layout.rows_I is not None:
        q_THD, k_TGD, v_TGD = (gather_rows(x, layout.rows_I) for x in (q_THD, k_TGD, v_TGD))
    heads, kv_heads = q_THD.shape[1], k_TGD.shape[1]
    if heads != kv_heads:  # torch 2.10 and 2.11 know no grouped queries here
        k_TGD, v_TGD = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k_TGD, v_TGD))
    left = -1 if window is None else window - 1  # the query's own position is not counted there
    out = varlen_attn(
        q_THD,
        k_TGD,
        v_TGD,
        layout.bounds_D1,
        layout.bounds_D1,
        layout.longest,
        layout.longest,
        window_size=(left, 0),
    )
    assert isinstance(out, torch.Tensor)
    out = out.reshape(len(q_THD), -1)
    return out if layout.rows_I is None else out.index_select(0, layout.restore_T)


def gather_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`x[rows]`; gradients of a row that is taken several times are added up in float32."""
    return _Gather.apply(x, rows) if x.dtype != torch.float32 else x.index_select(0, rows)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.num_rows = len(x)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        gradient = gradients[0].float()
        sums = gradient.new_zeros(ctx.num_rows, *gradient.shape[1:])
        return sums.index_add_(0, rows, gradient).to(gradients[0].dtype), None


def attend_cached(
    q_NHD: torch.Tensor,
    k_NGCD: torch.Tensor,
    v_NGCD: torch.Tensor,
    lengths_N: torch.Tensor,
    rules: NumericRules,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of one new token per sequence to its first `lengths` cached positions, or to the
    last `window` of these.

    C is the padded length that all N sequences share. With the blocked kernel each query is repeated to
    `query_rows` rows, so that the products have the shape-independent form of `attend_documents`.

    Returns:
        The attended values `[N, H * D]`.
    """
    num, heads, head_dim = q_NHD.shape
    positions_C = torch.arange(k_NGCD.shape[2], device=q_NHD.device)
    visible_NC = positions_C < lengths_N[:, None]
    if window is not None:
        visible_NC &= positions_C >= lengths_N[:, None] - window
    bias = torch.zeros(visible_NC.shape, dtype=q_NHD.dtype, device=q_NHD.device)
    bias_N11C = bias.masked_fill_(~visible_NC, -math.inf)[:, None, None]
    # A copy, because the batched product walks matrix by matrix over rows of stride 0.
    q = q_NHD[:, :, None].expand(num, heads, rules.query_rows(head_dim), head_dim).contiguous()
    if rules.attention == "blocked":
        out = attend_blocked(q, k_NGCD, v_NGCD, bias_N11C, rules.key_block)
    else:
        out = F.scaled_dot_product_attention(
            q, k_NGCD, v_NGCD, attn_mask=bias_N11C, enable_gqa=heads != k_NGCD.shape[1]
        )
    return out[:, :, 0].reshape(num, heads * head_dim)


def attend_blocked(
    q_NHRD: torch.Tensor,
    k_NGCD: torch.Tensor,
    v_NGCD: torch.Tensor,
    bias: torch.Tensor,
    key_block: int,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(D) + bias) v, summed over blocks of `key_block` keys in order.

    Masked keys contribute exactly 0, and the blocks have fixed size, so a row's bits do not depend
    on how far its document is padded. `bias` broadcasts to `[N, H, R, C]`; query heads share
    key/value heads in runs of H / G.
    """
    num, heads, rows, head_dim = q_NHRD.shape
    kv_heads, length = k_NGCD.shape[1], k_NGCD.shape[2]
    folded = (num, kv_heads, heads // kv_heads * rows)
    scores = q_NHRD.reshape(*folded, head_dim) @ k_NGCD.transpose(-1, -2)
    scores = (scores * head_dim**-0.5).view(num, heads, rows, length) + bias
    weights = torch.softmax(scores, dim=-1).view(*folded, length)
    if length <= key_block:
        out = weights @ v_NGCD
    else:
        out = weights[..., :key_block] @ v_NGCD[..., :key_block, :]
        for start in range(key_block, length, key_block):
            block = slice(start, start + key_block)
            out = out + weights[..., block] @ v_NGCD[..., block, :]
    return out.view(num, heads, rows, head_dim)


def _window(length: int, window: int, device: torch.device) -> torch.Tensor:
    """The keys that each query sees, bool [P, P]; not cached, because it is large on a GPU."""
    positions_P = torch.arange(length, device=device)
    distance_PP = positions_P[:, None] - positions_P
    return (distance_PP >= 0) & (distance_PP < window)


@lru_cache(maxsize=64)
def _causal_bias(length: int, dtype: torch.dtype, window: int | None) -> torch.Tensor:
    """0 on the diagonal and the `window - 1` (or all) places below it, -inf elsewhere, on the CPU
    [P, P]."""
    bias = torch.full((length, length), -math.inf, dtype=dtype)
    if window is None:
        return bias.triu_(1)
    return bias.triu(1) + bias.tril(-window)
