"""The one normaliser of the loss: how much each trained token weighs in the global batch.

The loss is a weighted sum over trained tokens, and the weights depend on the GLOBAL batch only:

    token     1 / (trained tokens of the batch)                          DAPO, arXiv 2503.14476
    sequence  1 / (trained sequences) / (trained tokens of the sequence)  GRPO, arXiv 2402.03300
    constant  1 / (all sequences) / (constant length)                     Dr. GRPO, arXiv 2503.20783

So the losses of packs ADD UP to the loss of the batch, however it is cut into packs, microbatches
or ranks. With several ranks: count over all ranks' sequences, then sum (not average) gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from miles_olmo.algo.pack import Pack
from miles_olmo.base.errors import TrainingError


@dataclass(frozen=True, slots=True)
class LossNormaliser:
    """Counts over the global batch, made once before the first pack."""

    tokens_S: tuple[int, ...]
    """Trained tokens of each sequence, by global sequence index [S]; 0 where all are masked."""
    constant_length: int
    """Divisor of the "constant" aggregation, in tokens."""

    def __post_init__(self) -> None:
        if self.num_tokens == 0:
            raise TrainingError(
                "E313",
                f"none of the batch's {len(self.tokens_S)} sequences has a trained token",
                why="a mean over nothing is undefined",
                fix='skip the step, raise rollout.max_response_tokens or set truncated = "score"',
            )

    @classmethod
    def of_packs(cls, packs: Sequence[Pack], *, constant_length: int) -> LossNormaliser:
        """Count the trained tokens of a batch whose packs are all here."""
        counts: dict[int, int] = {}
        for pack in packs:
            masks = pack.mask_T.split(list(pack.document_lengths))
            for index, mask in zip(pack.sequence_indices, masks, strict=True):
                counts[index] = int(mask.sum())
        assert sorted(counts) == list(range(len(counts))), "sequence indices must be 0..S-1"
        return cls(tuple(counts[index] for index in range(len(counts))), constant_length)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_S)

    @property
    def num_sequences(self) -> int:
        return len(self.tokens_S)

    @property
    def num_trained_sequences(self) -> int:
        return sum(count > 0 for count in self.tokens_S)

    def weights_T(
        self, pack: Pack, aggregation: Literal["token", "sequence", "constant"]
    ) -> torch.Tensor:
        """Weight of each token of a pack in the batch's loss, float32 [T]; 0 outside the mask."""
        weights_D = [self._weight(index, aggregation) for index in pack.sequence_indices]
        device = pack.mask_T.device
        lengths_D = torch.tensor(pack.document_lengths, device=device)
        weights_T = torch.tensor(weights_D, device=device).repeat_interleave(lengths_D)
        return weights_T * pack.mask_T

    def _weight(self, sequence: int, aggregation: str) -> float:
        if aggregation == "token":
            return 1.0 / self.num_tokens
        if aggregation == "constant":
            return 1.0 / (self.num_sequences * self.constant_length)
        return 1.0 / (self.num_trained_sequences * max(self.tokens_S[sequence], 1))
