from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from miles_olmo.wire.protocol import decode_routes, encode_routes

SHAPES = st.tuples(st.integers(0, 9), st.integers(1, 4), st.integers(1, 4))
ROUTES = st.one_of(
    arrays.arrays(np.uint8, SHAPES),
    arrays.arrays(np.uint16, SHAPES),
    arrays.arrays(np.int64, SHAPES),
)


@given(ROUTES)
def test_encoded_routes_are_what_numpy_reads_and_writes(routes):
    text = encode_routes(routes)
    loaded = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    buffer = io.BytesIO()
    np.save(buffer, routes)
    for other in (
        loaded,
        decode_routes(text),
        decode_routes(base64.b64encode(buffer.getvalue()).decode()),
    ):
        assert other.dtype == routes.dtype and other.shape == routes.shape
        assert (other == routes).all()


@given(ROUTES, st.data())
def test_cut_or_extended_bytes_are_refused(routes, data):
    raw = base64.b64decode(encode_routes(routes))
    cut = data.draw(st.integers(0, len(raw) - 1))
    for wrong in (raw[:cut], raw + b"\0"):
        with pytest.raises(ValueError, match="routed_experts"):
            decode_routes(base64.b64encode(wrong).decode())


def test_transposed_routes_are_encoded_by_value():
    routes = np.arange(12, dtype=np.uint8).reshape(3, 4, 1).transpose(1, 0, 2)
    assert (decode_routes(encode_routes(routes)) == routes).all()


def test_fortran_order_is_refused():
    buffer = io.BytesIO()
    np.save(buffer, np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)))
    with pytest.raises(ValueError, match="Fortran"):
        decode_routes(base64.b64encode(buffer.getvalue()).decode())
