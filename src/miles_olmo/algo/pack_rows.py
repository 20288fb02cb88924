"""Which tokens of a pack are computed: each distinct prefix once, and no document's last token.

A causal policy gives a token the same hidden state wherever the ids, and the forced experts, up to it
are the same. The samples of a group share their prompt, and often the beginning of their answers,
so most of a short answer's pack is repetition. Only attention sees the documents whole: it gathers
the rows of each. Losses, statistics and gradients are those of the whole pack; sums over equal rows
are taken before the backward pass instead of after it. (The same idea for the prompt alone: Prefix
Grouper, arXiv:2506.05433.) A document's last token is the input of nothing.

Dimension legend: T tokens, D documents, R computed rows, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

NO_ROW = -1
"""Row of a document's last token."""

_SEED = 0x5EED


def pack_rows(
    ids_T: torch.Tensor,
    routes_TLK: torch.Tensor | None,
    document_lengths: Sequence[int],
    *,
    share_prefixes: bool,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """The rows of a pack that is on the CPU.

    Args:
        ids_T: Token ids, int64 [T].
        routes_TLK: Experts to force, int64 [T, L, K]; rows with different ones are not shared.
        share_prefixes: Compute equal prefixes once; else only the last tokens are left out.

    Returns:
        (row of each token, int64 [T], `NO_ROW` for last tokens; first token of each row, int64 [R],
        ascending), or (None, None) if no token is the input of another.
    """
    lengths_D = np.asarray(document_lengths)
    ends_D = lengths_D.cumsum()
    is_input_T = np.ones(len(ids_T), dtype=bool)
    is_input_T[ends_D - 1] = False
    inputs = np.flatnonzero(is_input_T)
    if len(inputs) == 0:
        return None, None
    first_T = np.arange(len(ids_T))
    if share_prefixes:
        routes_TX = None if routes_TLK is None else routes_TLK.numpy().reshape(len(ids_T), -1)
        first_T = _first_with_prefix(ids_T.numpy(), routes_TX, lengths_D, inputs)
    token_R = np.unique(first_T[inputs])
    row_T = np.full(len(ids_T), NO_ROW)
    row_T[inputs] = np.searchsorted(token_R, first_T[inputs])
    return torch.from_numpy(row_T), torch.from_numpy(token_R)


def _first_with_prefix(
    ids_T: np.ndarray, routes_TX: np.ndarray | None, lengths_D: np.ndarray, inputs: np.ndarray
) -> np.ndarray:
    """First token of the pack that ends the same prefix; of inputs only, other tokens themselves.

    Prefixes are found by a polynomial hash modulo 2^64 and then compared. If two different ones
    have the same hash, nothing is shared.
    """
    starts_T = np.repeat(lengths_D.cumsum() - lengths_D, lengths_D)
    position_T = np.arange(len(ids_T)) - starts_T
    width = 1 if routes_TX is None else 1 + routes_TX.shape[1]
    drawn = np.random.default_rng(_SEED).integers(2**63, size=2 + width, dtype=np.uint64) * 2 + 1
    base, offset, *factors = drawn
    with np.errstate(over="ignore"):
        # The offset: a token whose value is 0 would not change the hash.
        token_T = _mixed(ids_T.astype(np.uint64) * factors[0] + offset)
        if routes_TX is not None:
            token_T = _mixed(token_T + routes_TX.astype(np.uint64) @ np.array(factors[1:]))
        powers = np.full(int(lengths_D.max()), base).cumprod()
        terms_T = token_T * powers[position_T]
        sums_T = terms_T.cumsum()
        prefix_T = sums_T - sums_T[starts_T] + terms_T[starts_T]
    _, first, which = np.unique(prefix_T[inputs], return_index=True, return_inverse=True)
    first_T = np.arange(len(ids_T))
    first_T[inputs] = inputs[first][which]

    theirs = first_T[inputs]
    same = (position_T[inputs] == position_T[theirs]) & (ids_T[inputs] == ids_T[theirs])
    if routes_TX is not None:
        same &= (routes_TX[inputs] == routes_TX[theirs]).all(axis=1)
    # By induction over positions: equal here, and the tokens before end the same prefix.
    inner = position_T[inputs] > 0
    same[inner] &= first_T[inputs[inner] - 1] == first_T[theirs[inner] - 1]
    return first_T if same.all() else np.arange(len(ids_T))


def _mixed(values: np.ndarray) -> np.ndarray:
    """Spread the bits of each uint64 (the finaliser of SplitMix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
