"""Which groups are trained on, and how they are split into updates."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miles_olmo.grpo.batch import split_evenly


@given(st.lists(st.integers(), max_size=40), st.integers(1, 9))
def test_splitting_keeps_order_and_gives_even_parts_none_empty(items, parts):
    split = list(split_evenly(items, parts))
    assert [item for part in split for item in part] == items
    assert len(split) == min(parts, len(items))
    sizes = [len(part) for part in split]
    assert all(sizes) and (not sizes or max(sizes) - min(sizes) <= 1)
