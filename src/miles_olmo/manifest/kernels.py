"""Which of several equivalent computations a device gets: named in the plan, used by the policy."""

from __future__ import annotations

from typing import Literal

AttentionKernel = Literal["blocked", "fused", "varlen"]
"""Attention inside the documents of a pack.

blocked: sums over key blocks of fixed size, bits independent of padding; fused: torch's
scaled-dot-product attention over documents of one padded length; varlen: one FlashAttention call
over all documents of a pack, no padding.
"""


def attention_kernel(device: str, dtype: str) -> AttentionKernel:
    """The kernel of a device type ("cpu", "cuda") and a dtype ("float32", "bfloat16").

    FlashAttention computes in 16 bits only.
    """
    if device == "cpu":
        return "blocked"
    return "varlen" if dtype == "bfloat16" else "fused"
