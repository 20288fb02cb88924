"""Which sequences share a pack: as few packs as possible, no sequence ever split.

Method: best-fit decreasing (asymptotically at most 11/9 of the optimum, Johnson 1974), then, if that is above the lower bound, a second packing that fills
one pack after another as full as it can be (minimum bin slack, Gupta and Ho 1999, with an exact
subset sum); the one with fewer packs wins. The second is skipped above a fixed amount of work.
Both are deterministic: ties go to the smaller index.

Left out: balancing the packs' attention cost, which is quadratic in the longest document.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate

from miles_olmo.base.errors import TrainingError

MAX_SUBSET_SUM_WORK = 2**33
"""Bound on bits shifted by the second packing: sequences x packs x max_tokens; about a second."""


def pack_lengths(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each pack.

    Args:
        lengths: Tokens per sequence, each at least 1.
        max_tokens: Longest pack.

    Returns:
        Packs ordered by their smallest index, indices ascending; every index exactly once.

    Raises:
        TrainingError: E311, a sequence is longer than a pack.
    """
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise TrainingError(
                "E311",
                f"sequence {index} has {length} tokens, train.packing.max_tokens is {max_tokens}",
                why="a sequence is never split over packs",
                fix=f"set train.packing.max_tokens to at least {length}",
                index=index,
                length=length,
            )
    assert all(length > 0 for length in lengths)
    # Longest first; equal lengths by index.
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    packs = _best_fit(order, lengths, max_tokens)
    work = len(lengths) * len(packs) * max_tokens
    if len(packs) > lower_bound(lengths, max_tokens) and work <= MAX_SUBSET_SUM_WORK:
        packs = min(packs, _fullest_first(order, lengths, max_tokens), key=len)
    return sorted(sorted(pack) for pack in packs)


def lower_bound(lengths: Sequence[int], max_tokens: int) -> int:
    """Packs that any packing needs: by volume, and by sequences that exclude each other.

    L2 of Martello and Toth (1990): for each threshold, sequences above max - threshold have a pack
    of their own, those above half a pack exclude each other, and the rest fills what is left.
    """
    ordered = sorted(lengths)
    sums = [0, *accumulate(ordered)]
    half = bisect_right(ordered, max_tokens // 2)
    best = -(-sums[-1] // max_tokens)
    for threshold in {0, *ordered[:half]}:
        alone = bisect_right(ordered, max_tokens - threshold)
        exclusive = max(alone - half, 0)
        room = exclusive * max_tokens - (sums[max(alone, half)] - sums[half])
        rest = sums[half] - sums[bisect_left(ordered, threshold)]
        needed = len(ordered) - half + max(0, -(-(rest - room) // max_tokens))
        best = max(best, needed)
    return best


def _best_fit(order: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each sequence where the least room is left over, else into a new pack."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, pack), sorted
    for index in order:
        length = lengths[index]
        position = bisect_left(rooms, (length, 0))
        if position == len(rooms):
            packs.append([])
            free, pack = max_tokens, len(packs) - 1
        else:
            free, pack = rooms.pop(position)
        packs[pack].append(index)
        insort(rooms, (free - length, pack))
    return packs


def _fullest_first(order: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill packs one by one: the longest remaining sequence, then the fullest set beside it."""
    remaining = list(order)
    packs = []
    while remaining:
        first, others = remaining[0], remaining[1:]
        pack = [first, *_fullest_subset(others, lengths, max_tokens - lengths[first])]
        taken = set(pack)
        packs.append(pack)
        remaining = [index for index in remaining if index not in taken]
    return packs


def _fullest_subset(candidates: list[int], lengths: Sequence[int], room: int) -> list[int]:
    """The subset with the largest sum up to `room`; bit s of a set says that sum s is reachable."""
    limit = (1 << (room + 1)) - 1
    reachable = [1]
    for index in candidates:
        sums = reachable[-1]
        reachable.append((sums | sums << lengths[index]) & limit)
        if reachable[-1] >> room:  # exactly full: no need to look further
            break
    total = reachable[-1].bit_length() - 1
    subset = []
    for position in range(len(reachable) - 1, 0, -1):
        if not reachable[position - 1] >> total & 1:  # only reachable with this candidate
            subset.append(candidates[position - 1])
            total -= lengths[candidates[position - 1]]
    return subset
