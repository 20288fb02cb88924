"""One pack: several sequences in one row, isolated from each other; the unit of a microbatch.

Dimension legend: T tokens of the pack, D documents (sequences), L routed layers, K experts per token.

Everything is aligned at TOKEN positions. For two documents of 3 and 2 tokens (T = 5):

    position t     0   1   2   3   4
    ids_T          a   b   c   d   e
    document       0   0   0   1   1
    logprobs_T     .   lb  lc  .   le     log p(ids[t] | earlier tokens of the document); 0 at starts
    mask_T         0   0   1   0   1      trained tokens; never True at a document's first token
    routes_TLK     r0  r1  -1  r3  -1     experts of token t as INPUT; a document's last row is -1

The logits that predict token t are those of token t - 1. Which tokens are computed is in `row_T` and
`token_R`: see `pack_rows`. R rows are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch


@dataclass(frozen=True)
class Pack:
    """Tensors of one pack, all of length T; padding is never added."""

    ids_T: torch.Tensor
    """Token ids, int64 [T]."""
    document_lengths: tuple[int, ...]
    """Tokens per document [D]; they add up to T."""
    sequence_indices: tuple[int, ...]
    """Index of each document's sequence in the global batch [D]."""
    mask_T: torch.Tensor
    """Trained tokens, bool [T]."""
    advantages_T: torch.Tensor
    """Advantage of the token's sequence, float32 [T]."""
    behaviour_logprobs_T: torch.Tensor
    """Logprobs reported by the engine, float32 [T]; 0 where nothing was sampled."""
    routes_TLK: torch.Tensor | None
    """Recorded experts, int64 [T, L, K], -1 = route natively; None without replay."""
    old_logprobs_T: torch.Tensor | None = None
    """Logprobs of the proximal policy, float32 [T]; the behaviour logprobs when None."""
    reference_logprobs_T: torch.Tensor | None = None
    """Logprobs of the reference policy, float32 [T]; None without a KL penalty."""
    row_T: torch.Tensor | None = None
    """Row that computes each token, int64 [T], -1 for last tokens; every token its own when None."""
    token_R: torch.Tensor | None = None
    """First token of each row, int64 [R]; None together with `row_T`."""

    @property
    def num_tokens(self) -> int:
        return int(self.ids_T.numel())

    @property
    def num_rows(self) -> int:
        """Tokens that are computed."""
        return self.num_tokens if self.token_R is None else int(self.token_R.numel())

    def to(self, device: torch.device) -> Pack:
        """The same pack on a device; itself if it is there already."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {n: t.to(device) for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        return self if self.ids_T.device == device else replace(self, **moved)
