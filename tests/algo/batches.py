"""Random batches for property tests: sequences, a policy to differentiate, and ways to pack them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st

from miles_olmo.algo.pack import Pack
from miles_olmo.algo.pack_builder import TrainingSequence, build_pack

torch.set_num_threads(1)


@dataclass
class Batch:
    """Sequences, and per sequence the logprobs of every policy, float32 [T]."""

    sequences: list[TrainingSequence]
    current: list[torch.Tensor]
    old: list[torch.Tensor]
    reference: list[torch.Tensor]

    def pack(self, members: list[int]) -> tuple[Pack, torch.Tensor]:
        """One pack of some sequences, with the current policy's logprobs over it."""
        pack = build_pack([self.sequences[index] for index in members])
        pack = replace(
            pack,
            old_logprobs_T=torch.cat([self.old[index] for index in members]),
            reference_logprobs_T=torch.cat([self.reference[index] for index in members]),
        )
        return pack, torch.cat([self.current[index] for index in members])


@st.composite
def batches(draw, max_sequences: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    lengths = draw(st.lists(st.integers(2, 9), min_size=1, max_size=max_sequences))
    sequences, current, old, reference = [], [], [], []
    for index, length in enumerate(lengths):
        mask_T = torch.rand(length, generator=generator) < 0.7
        mask_T[0] = False
        if index == 0:
            mask_T[1] = True  # a batch has at least one trained token
        behaviour_T = -torch.rand(length, generator=generator) * 4 * mask_T
        sequences.append(
            TrainingSequence(
                index=index,
                sample_id=f"{index}.0",
                ids_T=torch.randint(0, 50, (length,), generator=generator),
                mask_T=mask_T,
                behaviour_logprobs_T=behaviour_T,
                routes_TLK=None,
                advantage=float(torch.randn((), generator=generator)),
            )
        )
        for policy, spread in ((current, 0.6), (old, 0.3), (reference, 1.0)):
            noise_T = torch.randn(length, generator=generator) * spread
            policy.append((behaviour_T + noise_T) * mask_T)
    current = [logprobs_T.requires_grad_() for logprobs_T in current]
    return Batch(sequences, current, old, reference)


@st.composite
def partitions(draw, count: int) -> list[list[int]]:
    """Any way to cut a permutation of 0..count-1 into packs."""
    order = draw(st.permutations(range(count)))
    cuts = draw(st.lists(st.booleans(), min_size=count - 1, max_size=count - 1))
    packs = [[order[0]]]
    for index, cut in zip(order[1:], cuts, strict=True):
        packs.append([index]) if cut else packs[-1].append(index)
    return packs
