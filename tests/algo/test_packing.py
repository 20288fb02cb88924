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


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(30, 45))
def test_the_number_of_packs_is_near_the_optimum(lengths, max_tokens):
    optimum = _optimum(lengths, max_tokens)
    assert lower_bound(lengths, max_tokens) <= optimum
    assert optimum <= len(pack_lengths(lengths, max_tokens)) <= 11 / 9 * optimum + 6 / 9


def test_a_case_where_best_fit_decreasing_alone_wastes_a_pack():
    # decreasing order pairs 6 with 3; the optimum is (5 3 2) (6 4)... : both packs exactly full
    lengths = [6, 4, 5, 3, 2]
    assert pack_lengths(lengths, 10) == [[0, 1], [2, 3, 4]]
    # 44/24/21... best-fit decreasing needs three packs of 100 here, two are enough
    hard = [44, 24, 24, 22, 21, 17, 8, 8, 6, 6]
    assert sum(hard) == 180
    assert len(pack_lengths(hard, 90)) == 2


def test_no_sequences_need_no_packs():
    assert pack_lengths([], 10) == []


def test_a_sequence_longer_than_a_pack_is_refused():
    with pytest.raises(TrainingError) as caught:
        pack_lengths([3, 11], 10)
    assert caught.value.code == "E311"
    assert caught.value.details == {"index": 1, "length": 11}
