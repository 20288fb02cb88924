"""Drawing tokens so that a sequence's tokens depend on its seed and its own logprobs alone.

Each sequence has a counter-based stream of uniforms (Philox 4x64, keyed by the request's seed); token
n uses the n-th number, by inversion of the cumulative distribution in float64. What is batched
beside the sequence, or when it is computed anew, changes nothing.

Dimension legend: N sequences, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch


def uniforms(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers of a seed's stream, float64 in [0, 1) `[count]`.

    The upper 53 bits of each Philox output, so that the stream is fixed by the generator's
    specification (Salmon et al. 2011) and not by a library's choice of distribution code.
    """
    raw = np.random.Philox(key=seed).random_raw(count)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_tokens(
    logprobs_NV: torch.Tensor, uniforms_N: torch.Tensor, greedy_N: torch.Tensor
) -> torch.Tensor:
    """One token per row: the most likely where greedy, else drawn by inversion, int64 [N].

    Args:
        logprobs_NV: Log probabilities, float32.
        uniforms_N: Numbers in [0, 1), float64.
        greedy_N: Rows that take the most likely token (the lowest id among equals), bool.
    """
    cumulative_NV = logprobs_NV.double().exp_().cumsum_(dim=-1)
    total_N = cumulative_NV[:, -1]
    # Rounding must not carry a target up to the total, past the last token.
    targets_N = torch.minimum(
        uniforms_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N))
    )
    # right=True takes the first token whose cumulative probability EXCEEDS the target, so a token of
    # probability 0 is never drawn.
    drawn_N = torch.searchsorted(cumulative_NV, targets_N[:, None], right=True)[:, 0]
    if not bool(greedy_N.any()):
        return drawn_N
    return torch.where(greedy_N, logprobs_NV.argmax(dim=-1), drawn_N)
