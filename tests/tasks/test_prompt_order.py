"""The visiting order is a pure function of the position."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_olmo.tasks.order import epoch_order, prompt_index

sizes = st.integers(1, 50)
seeds = st.integers(0, 2**40)


@given(num=sizes, seed=seeds, shuffle=st.booleans(), epoch=st.integers(0, 30))
def test_each_epoch_visits_every_prompt_once(num, seed, shuffle, epoch):
    positions = range(epoch * num, (epoch + 1) * num)
    visited = [prompt_index(position, num, seed=seed, shuffle=shuffle) for position in positions]
    assert sorted(visited) == list(range(num))
    if not shuffle:
        assert visited == list(range(num))


@given(num=sizes, seed=seeds, positions=st.lists(st.integers(0, 500), max_size=20))
def test_the_index_depends_on_nothing_but_the_arguments(num, seed, positions):
    before = {p: prompt_index(p, num, seed=seed, shuffle=True) for p in positions}
    epoch_order.cache_clear()
    for position in reversed(positions):
        assert prompt_index(position, num, seed=seed, shuffle=True) == before[position]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {epoch_order(100, epoch, seed) for epoch in range(3) for seed in range(3)}
    assert len(orders) == 9


def test_the_order_is_the_same_on_every_machine_and_release():
    assert [prompt_index(p, 8, seed=0, shuffle=True) for p in range(10)] == [
        4,
        0,
        1,
        7,
        2,
        5,
        6,
        3,
        0,
        7,
    ]


@pytest.mark.parametrize(("position", "num"), [(-1, 5), (0, 0)])
def test_positions_outside_the_data_are_refused(position, num):
    with pytest.raises(ValueError):
        prompt_index(position, num, seed=0, shuffle=True)
