"""Which tokens of a pack are computed, against prefixes compared one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.algo import pack_rows as module
from miles_olmo.algo.pack_rows import NO_ROW, pack_rows

WIDTH = (2, 2)


@st.composite
def documents(draw) -> tuple[list[list[int]], list[np.ndarray] | None]:
    """Documents of few token values, so that prefixes are often equal, and their routes."""
    tokens = st.lists(st.sampled_from([0, 1, 151_642]), min_size=1, max_size=7)
    ids = draw(st.lists(tokens, min_size=1, max_size=8))
    if draw(st.booleans()):
        return ids, None
    random = np.random.default_rng(draw(st.integers(0, 99)))
    routes = []
    for document in ids:
        rows = np.tile(np.arange(2), (len(document), 2, 1))
        rows[random.random(len(document)) < 0.1] = 7
        rows[-1] = -1
        routes.append(rows)
    return ids, routes


def tensors(ids, routes):
    routes_TLK = None if routes is None else torch.from_numpy(np.concatenate(routes))
    flat = [token for document in ids for token in document]
    return torch.tensor(flat), routes_TLK, [len(document) for document in ids]


def prefixes(ids, routes):
    """What each token's hidden state depends on; None for the last token of a document."""
    found = []
    for number, document in enumerate(ids):
        for length in range(1, len(document)):
            rows = b"" if routes is None else routes[number][:length].tobytes()
            found.append((tuple(document[:length]), rows))
        found.append(None)
    return found


@settings(deadline=None)
@given(documents())
def test_tokens_share_a_row_exactly_if_their_prefixes_are_equal(batch):
    ids_T, routes_TLK, lengths = tensors(*batch)
    expected = prefixes(*batch)
    row_T, token_R = pack_rows(ids_T, routes_TLK, lengths, share_prefixes=True)
    if all(prefix is None for prefix in expected):
        assert row_T is None and token_R is None
        return
    rows, firsts = row_T.tolist(), token_R.tolist()
    assert [row == NO_ROW for row in rows] == [prefix is None for prefix in expected]
    inputs = [token for token, row in enumerate(rows) if row != NO_ROW]
    for one in inputs:
        for other in inputs:
            assert (rows[one] == rows[other]) == (expected[one] == expected[other])
    assert firsts == sorted(set(firsts)) and set(rows) - {NO_ROW} == set(range(len(firsts)))
    assert [rows.index(row) for row in range(len(firsts))] == firsts


@settings(deadline=None)
@given(documents())
def test_without_sharing_only_last_tokens_are_left_out(batch):
    ids_T, routes_TLK, lengths = tensors(*batch)
    row_T, token_R = pack_rows(ids_T, routes_TLK, lengths, share_prefixes=False)
    kept = [token for token, prefix in enumerate(prefixes(*batch)) if prefix is not None]
    if not kept:
        assert row_T is None and token_R is None
        return
    assert token_R.tolist() == kept
    assert row_T[token_R].tolist() == list(range(len(kept)))


@pytest.mark.parametrize("collide", [lambda x: x * 0, lambda x: x % 2, lambda x: x // 2**62])
@settings(deadline=None)
@given(documents())
def test_prefixes_whose_hashes_collide_are_never_shared(collide, batch):
    ids_T, routes_TLK, lengths = tensors(*batch)
    expected = prefixes(*batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_mixed", collide)
        row_T, _ = pack_rows(ids_T, routes_TLK, lengths, share_prefixes=True)
    rows = [] if row_T is None else row_T.tolist()
    for one, row in enumerate(rows):
        for other, theirs in enumerate(rows):
            if row == theirs != NO_ROW:
                assert expected[one] == expected[other]


def test_a_group_of_answers_to_one_prompt_computes_the_prompt_once():
    prompt, answers = [5] * 100, [[number, 1, 2] for number in range(8)]
    ids = [prompt + answer for answer in answers]
    row_T, token_R = pack_rows(*tensors(ids, None)[:1], None, [103] * 8, share_prefixes=True)
    assert len(token_R) == 100 + 8 * 2
    assert row_T.view(8, 103)[:, :100].eq(torch.arange(100)).all()
