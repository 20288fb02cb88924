"""Group advantages."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_olmo.algo.advantages import group_advantages
from miles_olmo.base.errors import TrainingError
from miles_olmo.manifest.models import Advantage

GRPO = Advantage()
CENTRED = Advantage(std="none")
rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=12)


def test_hand_computed_group():
    # mean 1, deviations -1 0 1 0, unbiased variance 2/3
    scale = math.sqrt(2 / 3) + 1e-6
    result = group_advantages([0.0, 1.0, 2.0, 1.0], GRPO)
    assert result.advantages_G == pytest.approx((-1 / scale, 0, 1 / scale, 0))
    assert (result.mean, result.std) == pytest.approx((1.0, math.sqrt(2 / 3)))
    assert result.carries_signal


def test_centred_only_is_not_scaled():
    assert group_advantages([0.0, 1.0, 2.0, 1.0], CENTRED).advantages_G == (-1.0, 0.0, 1.0, 0.0)


def test_without_a_baseline_the_reward_is_the_advantage():
    result = group_advantages([1.0, 1.0], Advantage(baseline="none", std="none"))
    assert result.advantages_G == (1.0, 1.0)
    assert result.carries_signal


@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -1e9])
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("settings", [GRPO, CENTRED])
def test_equal_rewards_carry_exactly_no_signal(reward, size, settings):
    result = group_advantages([reward] * size, settings)
    assert result.advantages_G == (0.0,) * size
    assert not result.carries_signal


def test_groups_of_different_sizes_keep_their_own_mean():
    large = group_advantages([0.0, 0.0, 0.0, 1.0], CENTRED)
    small = group_advantages([1.0, 2.0], CENTRED)
    assert large.advantages_G == (-0.25, -0.25, -0.25, 0.75)
    assert small.advantages_G == (-0.5, 0.5)


@given(rewards)
def test_advantages_are_centred_and_ordered_like_the_rewards(values):
    result = group_advantages(values, GRPO).advantages_G
    assert sum(result) == pytest.approx(0, abs=1e-6 * len(values))
    for a in range(len(values)):
        for b in range(len(values)):
            if values[a] < values[b]:
                assert result[a] <= result[b]


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=8), st.integers(-9, 9))
def test_adding_a_constant_to_every_reward_changes_nothing(values, shift):
    base = group_advantages([float(v) for v in values], GRPO).advantages_G
    moved = group_advantages([float(v + shift) for v in values], GRPO).advantages_G
    assert moved == pytest.approx(base, abs=1e-9)


@pytest.mark.parametrize("values", [[], [0.0, math.nan], [math.inf, 0.0]])
def test_rewards_that_are_not_finite_numbers_are_refused(values):
    with pytest.raises(TrainingError, match="E312"):
        group_advantages(values, GRPO)
