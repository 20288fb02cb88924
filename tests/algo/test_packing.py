"""Which sequences share a pack."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.algo.packing import lower_bound, pack_lengths
from miles_olmo.base.errors import TrainingError

lengths_lists = st.lists(st.integers(1, 100), max_size=40)


def _optimum(lengths: list[int], capacity: int) -> int:
    """Fewest packs, by trying: each sequence into every pack it fits in, longest first."""
    best = len(lengths)

    def place(index: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(ordered):
            best = len(rooms)
            return
        for room in sorted(set(rooms)):
            if room >= ordered[index]:
                rest = list(rooms)
                rest.remove(room)
                place(index + 1, [*rest, room - ordered[index]])
        place(index + 1, [*rooms, capacity - ordered[index]])

    ordered = sorted(lengths, reverse=True)
    place(0, [])
    return best


@given(lengths_lists, st.integers(100, 130))
def test_every_sequence_is_in_exactly_one_pack_that_holds_it(lengths, max_tokens):
    packs = pack_lengths(lengths, max_tokens)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    assert all(pack for pack in packs)
    assert all(sum(lengths[index] for index in pack) <= max_tokens for pack in packs)
    assert packs == pack_lengths(list(lengths), max_tokens)


@settings(max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(30, 45))
def test_the_number_of_packs_is_near_the_optimum(lengths, max_tokens):
    optimum = _optimum(lengths, max_tokens)
    assert lower_bound(lengths, max_tokens) <= optimum
    assert optimum <= len(pack_lengths(lengths, max_tokens)) <= 11 / 9 * optimum + 6 / 9


def test_a_pack_is_saved_where_best_fit_decreasing_wastes_one():
    # Best-fit decreasing needs four packs: 9 8, 8 8 2, 5 5 5, 4. Three exactly full ones exist.
    packs = pack_lengths([4, 5, 5, 8, 8, 9, 2, 8, 5], 18)
    assert len(packs) == 3


@given(lengths_lists, st.integers(100, 130))
def test_the_lower_bound_equals_its_definition(lengths, max_tokens):
    best = -(-sum(lengths) // max_tokens)
    for threshold in range(max_tokens // 2 + 1):
        alone = [n for n in lengths if n > max_tokens - threshold]
        halves = [n for n in lengths if n <= max_tokens - threshold and 2 * n > max_tokens]
        rest = sum(n for n in lengths if threshold <= n and 2 * n <= max_tokens)
        overflow = rest - (len(halves) * max_tokens - sum(halves))
        best = max(best, len(alone) + len(halves) + max(0, -(-overflow // max_tokens)))
    assert lower_bound(lengths, max_tokens) == best


def test_no_sequences_need_no_packs():
    assert pack_lengths([], 10) == []


def test_a_sequence_longer_than_a_pack_is_refused():
    with pytest.raises(TrainingError) as caught:
        pack_lengths([3, 11], 10)
    assert caught.value.code == "E311"
    assert caught.value.details == {"index": 1, "length": 11}
