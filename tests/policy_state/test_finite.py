"""The one-pass finiteness check of published weights agrees with the element-wise one."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_olmo.policy.tensor_files import is_finite

VALUES = st.lists(
    st.floats(width=32, allow_nan=True, allow_infinity=True, allow_subnormal=True), max_size=40
)


@given(VALUES)
def test_it_agrees_with_the_element_wise_check(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    assert is_finite(tensor) == bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 4095, 4999])
def test_one_bad_element_is_found_wherever_it_is(dtype, bad, place):
    tensor = torch.randn(50, 100).to(dtype)
    assert is_finite(tensor) and is_finite(tensor.T)
    tensor.view(-1)[place] = bad
    assert not is_finite(tensor) and not is_finite(tensor.T)


def test_the_largest_finite_values_pass():
    assert is_finite(torch.tensor([torch.finfo(torch.bfloat16).max] * 3, dtype=torch.bfloat16))
    assert is_finite(torch.empty(0, 4))
