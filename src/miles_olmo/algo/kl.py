"""Estimators of the divergence between two policies from one sampled token.

Source: J. Schulman, "Approximating KL divergence" (2020). With d = log q - log p for a token sampled
from p, KL(p || q) is estimated by k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (never negative).
As a LOSS they differ: the gradient of k1 is zero in expectation, that of k2 is the exact one for
on-policy tokens, that of k3 leads to KL(q || p) (Tang and Munos 2025, arXiv 2506.09477).

As in the field, |d| is cut at 20 and the result at 10, so that one token cannot blow up a batch; a
token beyond either bound gives no gradient. Left out: importance weights for off-policy tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

MAX_LOG_RATIO = 20.0
MAX_KL = 10.0


def kl_estimate(
    logprobs_N: torch.Tensor, other_logprobs_N: torch.Tensor, estimator: Literal["k1", "k2", "k3"]
) -> torch.Tensor:
    """KL(policy || other) per token, nats, float32 [N].

    Args:
        logprobs_N: Logprobs of the policy that sampled the tokens, float32 [N].
        other_logprobs_N: Logprobs of the other policy, float32 [N].
    """
    difference_N = (other_logprobs_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return (-difference_N).clamp(-MAX_KL, MAX_KL)
    if estimator == "k2":
        return (0.5 * difference_N.square()).clamp(max=MAX_KL)
    # expm1 keeps the digits that exp(d) - 1 loses near zero; 0 is its true lower bound.
    return (torch.expm1(difference_N) - difference_N).clamp(0.0, MAX_KL)
