"""When the same token must give the same bits, whatever is computed beside it.

On a CPU in float32 with ONE torch thread, a row of a matrix product depends on how many rows stand
beside it when there are few of them, because MKL picks other kernels for thin matrices. Measured on
an AVX-512 Xeon with torch 2.13: rows are equal in bits from 6 rows on for an inner size of 128, 11
for 256, 16 for 512. An attention row depends on the padded length of its document unless sums run
over blocks of fixed size. So:

- no product gets fewer than `min_rows` rows: short inputs and thin expert groups are padded;
- a pass has a multiple of `row_multiple` rows, because elementwise kernels compute the last elements
  of an odd-sized tensor with other code than the rest (seen with sigmoid);
- documents are padded to a multiple of `document_multiple` inside attention, and the weighted sum
  over values runs over `key_block` keys at a time, first to last.

With these rules generation with a KV cache and training on packs give bit-identical logprobs.

On CUDA kernels choose their tiling differently and bits are not promised; there the padding only
costs time, so `rules_for` switches it off. This is the only switch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from miles_olmo.manifest.kernels import AttentionKernel, attention_kernel


@dataclass(frozen=True)
class NumericRules:
    """Padding that makes each row's result independent of the other rows."""

    attention: AttentionKernel
    """How documents attend to themselves."""
    min_rows: int
    """Fewest rows of an expert group and of the output head."""
    row_multiple: int
    """A pass over tokens has a multiple of this many rows."""
    document_multiple: int
    """Documents are padded to a multiple of this many tokens inside attention."""
    key_block: int
    """Keys per partial sum of attention; a multiple of document_multiple."""

    def query_rows(self, head_dim: int) -> int:
        """Rows that one query is repeated to when it is attended alone.

        Batches of small products are settled with far fewer rows: measured, a row has its final bits from 2
        rows on for head_dim 32, from 3 for 64, from 6 for 128. Twice that or more is used.
        """
        return min(self.min_rows, max(4, -(-head_dim // 8)))

    def missing_rows(self, num_rows: int) -> int:
        """Padding rows that a pass over `num_rows` tokens needs."""
        return -num_rows % self.row_multiple

    def padded(self, length: int) -> int:
        """Length of a document inside attention."""
        return -(-length // self.document_multiple) * self.document_multiple


EXACT = NumericRules("blocked", min_rows=16, row_multiple=32, document_multiple=16, key_block=64)
FAST = NumericRules("fused", min_rows=1, row_multiple=1, document_multiple=16, key_block=64)


def rules_for(device: torch.device, dtype: str) -> NumericRules:
    """The rules of a device: exact on CPU, fast elsewhere; `dtype` as in `model.dtype`."""
    if device.type == "cpu":
        return EXACT
    return replace(FAST, attention=attention_kernel(device.type, dtype))
