"""The order in which a run visits its prompts.

A pure function of the position, so that a cursor is one integer: a resumed run continues exactly where
it stopped, whatever machine it resumes on.
"""

from __future__ import annotations

from functools import lru_cache

from miles_olmo.base.seeds import derive_seed


def prompt_index(position: int, num_prompts: int, *, seed: int, shuffle: bool) -> int:
    """Index of the prompt that group number `position` of the run asks.

    Args:
        position: Groups since the run's start, from 0; epoch = position // num_prompts.
        num_prompts: Prompts in the set, at least 1.
        seed: The run's seed.
        shuffle: Visit each epoch in a seeded random order of its own, else in file order.
    """
    if position < 0 or num_prompts < 1:
        raise ValueError(f"no prompt at position {position} of {num_prompts} prompts")
    epoch, offset = divmod(position, num_prompts)
    return epoch_order(num_prompts, epoch, seed)[offset] if shuffle else offset


@lru_cache(maxsize=4)
def epoch_order(num_prompts: int, epoch: int, seed: int) -> tuple[int, ...]:
    """A seeded permutation of `range(num_prompts)`.

    Sorted by a hash of each index rather than shuffled by `random`, whose algorithm Python does not
    promise to keep.
    """
    keys = [derive_seed(seed, "order", epoch, index) for index in range(num_prompts)]
    return tuple(sorted(range(num_prompts), key=keys.__getitem__))
