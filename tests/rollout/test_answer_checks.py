from __future__ import annotations

import base64
import contextlib
import copy
import io
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_engines import LIMITS, completion_body, group
from table_model import EXPERTS, LAYERS, SHAPE, TOP_K, VOCAB, sample_alone

from miles_olmo.base.codes import CODES
from miles_olmo.base.errors import EngineError
from miles_olmo.rollout.answers import AnswerCheck, PolicyShape, is_aborted, trajectory
from miles_olmo.rollout.core_completions import NEUTRAL, completion_answer, parse_completion
from miles_olmo.wire.protocol import decode_routes, encode_routes

REQUEST = group(5, num_samples=3)


def true_answer(request=REQUEST, version: int = 1):
    """What a server would send, through JSON."""
    parsed = parse_completion(json.loads(json.dumps(request.body("policy"))), LIMITS)
    sequences = [sample_alone(sample, 1) for sample in parsed.samples]
    return json.loads(json.dumps(completion_answer(parsed, sequences, version, "policy", "id")))


TRUE_ANSWER = true_answer()


def check(answer, request=REQUEST, shape=SHAPE, version=1):
    return AnswerCheck(request, shape, version, "engine-0").choices(answer)


@given(
    prompt_ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10),
    num_samples=st.integers(1, 4),
    max_tokens=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 2**62),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3),
)
def test_true_answers_pass_and_become_aligned_trajectories(stop_token_ids, prompt_ids, **fields):
    request = group(5, prompt_ids=tuple(prompt_ids), stop_token_ids=tuple(stop_token_ids), **fields)
    for index, choice in enumerate(check(true_answer(request), request)):
        made = trajectory(request, index, choice, 1, lambda ids: f"{len(ids)} tokens")
        prompt, response = made.segments
        sample = parse_completion(json.loads(json.dumps(request.body("policy"))), LIMITS)
        expected = sample_alone(sample.samples[index], 1)
        assert made.sample_id == f"5.{index}" and made.text == f"{len(expected.token_ids)} tokens"
        assert made.ids == (*prompt_ids, *expected.token_ids)
        assert response.logprobs == expected.logprobs  # every bit survives JSON
        assert (prompt.version, prompt.logprobs, response.version) == (None, None, 1)
        assert not any(prompt.loss_mask) and all(response.loss_mask)
        assert prompt.routes is not None and response.routes is not None
        assert prompt.routes.dtype == response.routes.dtype == np.int16
        routes_TLK = np.concatenate([prompt.routes, response.routes])
        assert len(prompt.routes) == len(prompt_ids)
        assert (routes_TLK[:-1] == expected.routes).all() and (routes_TLK[-1] == -1).all()


def with_routes(change):
    def fault(answer):
        choice = answer["choices"][1]
        routes = change(decode_routes(choice["routed_experts"]).copy())
        choice["routed_experts"] = encode_routes(routes)

    return fault


def with_choice(**fields):
    return lambda answer: answer["choices"][1].update(fields)


def with_logprob(value):
    def fault(answer):
        answer["choices"][1]["logprobs"]["token_logprobs"][0] = value

    return fault


def with_token(position, value):
    def fault(answer):
        answer["choices"][1]["token_ids"][position] = value

    return fault


def without_last_token(answer):
    choice = answer["choices"][1]
    choice["token_ids"].pop()
    choice["logprobs"]["token_logprobs"].pop()


def extra_token(answer):
    choice = answer["choices"][1]
    choice["token_ids"] = [1] * 7
    choice["logprobs"]["token_logprobs"] = [-1.0] * 7


def set_element(routes, value):
    routes[0, 0, 0] = value
    return routes


def twice(routes):
    routes[0, 1, 1] = routes[0, 1, 0]
    return routes


def pickled_object() -> str:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class Replaced:
    """Another answer altogether."""

    answer: object


FAULTS = {
    "E230": [
        Replaced(None),
        Replaced([]),
        Replaced({"choices": []}),
        lambda a: a.update(choices=None),
        lambda a: a.update(choices=[1, 2, 3]),
        lambda a: a["choices"][1].pop("index"),
        lambda a: a["choices"][1].pop("token_ids"),
        with_choice(logprobs=None),
        with_choice(token_ids="7"),
    ],
    "E231": [
        lambda a: a["choices"].pop(),
        lambda a: a["choices"].append(a["choices"][0]),
        with_choice(index=0),
        with_choice(index="1"),
        lambda a: a["choices"].clear(),
    ],
    "E232": [
        with_choice(prompt_token_ids=[3, 1]),
        with_choice(prompt_token_ids=[0, 3, 1, 4]),
        with_choice(prompt_token_ids=None),
    ],
    "E233": [
        lambda a: a["choices"][1]["logprobs"]["token_logprobs"].pop(),
        lambda a: a["choices"][1]["token_ids"].append(1),
    ],
    "E234": [
        extra_token,
        with_choice(token_ids=[], logprobs={"token_logprobs": []}),
        lambda a: (without_last_token(a), a["choices"][1].update(finish_reason="length")),
    ],
    "E235": [with_token(0, VOCAB), with_token(0, -1), with_token(0, 1.0), with_token(0, True)],
    "E236": [
        with_logprob(math.nan),
        with_logprob(math.inf),
        with_logprob(-math.inf),
        with_logprob(0.01),
        with_logprob(None),
        with_logprob("-1"),
    ],
    "E237": [
        with_choice(finish_reason=None),
        with_choice(finish_reason="tool_calls"),
        with_choice(finish_reason="stop"),
        with_token(0, 7),
        with_token(-1, 7),
    ],
    "E238": [lambda a: a.update(weight_version=0), lambda a: a.update(weight_version=None)],
    "E240": [
        with_choice(routed_experts=None),
        with_choice(routed_experts=""),
        lambda a: a["choices"][1].pop("routed_experts"),
    ],
    "E241": [
        with_choice(routed_experts="not base64!"),
        with_choice(routed_experts=base64.b64encode(b"not npy").decode()),
        with_choice(routed_experts=[[[1, 2]]]),
        with_choice(routed_experts=pickled_object()),
        with_routes(lambda r: r.astype(np.int64)),
        with_routes(lambda r: r.astype(np.float32)),
    ],
    "E242": [with_routes(lambda r: r[1:]), with_routes(lambda r: np.concatenate([r, r[:1]]))],
    "E243": [
        with_routes(lambda r: r[:, :1]),
        with_routes(lambda r: r[..., :1]),
        with_routes(lambda r: r.reshape(-1)),
    ],
    "E244": [with_routes(np.zeros_like)],
    "E245": [with_routes(lambda r: set_element(r, EXPERTS)), with_routes(lambda r: r + 200)],
    "E246": [with_routes(twice)],
}


@pytest.mark.parametrize(
    ("code", "number"), [(code, i) for code, faults in FAULTS.items() for i in range(len(faults))]
)
def test_every_fault_has_its_own_code(code, number):
    answer = copy.deepcopy(TRUE_ANSWER)
    assert all(len(choice["token_ids"]) == 6 for choice in answer["choices"])  # no early stop
    fault = FAULTS[code][number]
    if isinstance(fault, Replaced):
        answer = fault.answer
    else:
        fault(answer)
    with pytest.raises(EngineError) as caught:
        check(answer)
    assert caught.value.code == code and code in CODES
    assert "engine-0" in caught.value.what and caught.value.why and caught.value.fix
    assert caught.value.details["group_id"] == 5


def test_choices_in_another_order_are_put_in_order():
    answer = copy.deepcopy(TRUE_ANSWER)
    answer["choices"].reverse()
    assert [c.ids for c in check(answer)] == [c.ids for c in check(TRUE_ANSWER)]


def test_routes_above_256_experts_come_as_uint16():
    answer = copy.deepcopy(TRUE_ANSWER)
    for choice in answer["choices"]:
        routes = decode_routes(choice["routed_experts"]).astype(np.uint16) + 400
        choice["routed_experts"] = encode_routes(routes)
    shape = PolicyShape(VOCAB, LAYERS, TOP_K, num_experts=512)
    rows = check(answer, shape=shape)[0].rows_RLK
    assert rows is not None and rows.min() >= 400


def test_top_1_may_send_one_sample_to_expert_0_but_not_the_whole_group():
    shape = PolicyShape(VOCAB, LAYERS, 1, EXPERTS)
    answer = copy.deepcopy(TRUE_ANSWER)
    for choice in answer["choices"]:
        routes = decode_routes(choice["routed_experts"])[..., :1]
        choice["routed_experts"] = encode_routes(np.ascontiguousarray(routes))
    zeros = encode_routes(np.zeros((8, LAYERS, 1), np.uint8))
    answer["choices"][0]["routed_experts"] = zeros
    check(answer, shape=shape)
    for choice in answer["choices"]:
        choice["routed_experts"] = zeros
    with pytest.raises(EngineError, match="E244"):
        check(answer, shape=shape)


def test_only_routed_layers_are_checked():
    """A dense layer's rows are zeros, as vLLM writes them."""
    answer = copy.deepcopy(TRUE_ANSWER)
    for choice in answer["choices"]:
        routes = decode_routes(choice["routed_experts"]).copy()
        routes[:, 0] = 0
        choice["routed_experts"] = encode_routes(routes)
    with pytest.raises(EngineError, match="E246"):
        check(answer)
    shape = PolicyShape(VOCAB, LAYERS, TOP_K, EXPERTS, routed_layers=(1,))
    rows = check(answer, shape=shape)[0].rows_RLK
    assert rows is not None and rows.shape[1] == LAYERS  # kept whole
    for choice in answer["choices"]:
        routes = decode_routes(choice["routed_experts"]).copy()
        routes[:, 1] = 0
        choice["routed_experts"] = encode_routes(routes)
    with pytest.raises(EngineError, match="E244"):
        check(answer, shape=shape)


def test_without_replay_routes_are_neither_needed_nor_kept():
    shape = PolicyShape(VOCAB, LAYERS, TOP_K, EXPERTS, routes=False)
    answer = copy.deepcopy(TRUE_ANSWER)
    del answer["choices"][1]["routed_experts"]
    made = trajectory(REQUEST, 1, check(answer, shape=shape)[1], 1, str)
    assert [segment.routes for segment in made.segments] == [None, None]


def test_ignore_stop_needs_the_whole_budget_and_allows_stop_tokens_inside():
    request = group(5, num_samples=3, ignore_stop=True)
    answer = true_answer(request)
    answer["choices"][0]["token_ids"][1] = 7
    check(answer, request)
    answer["choices"][0]["finish_reason"] = "stop"
    with pytest.raises(EngineError, match="E237"):
        check(answer, request)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["abort", "stop", "length", encode_routes(np.zeros((0,), np.uint8))]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=4,
)


def _places(node, path=()):
    """Every place in a JSON value."""
    yield path
    items = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, value in items:
        yield from _places(value, (*path, key))


PLACES = list(_places(TRUE_ANSWER))


@given(place=st.sampled_from(PLACES), value=JSON)
def test_any_value_in_any_place_is_accepted_or_named(place, value):
    answer = copy.deepcopy(TRUE_ANSWER)
    if place:
        node = answer
        for key in place[:-1]:
            node = node[key]
        node[place[-1]] = value
    else:
        answer = value
    is_aborted(answer)
    with contextlib.suppress(EngineError):
        for choice in check(answer):
            assert all(math.isfinite(logprob) for logprob in choice.logprobs)


@given(
    st.dictionaries(st.sampled_from([*completion_body(), *NEUTRAL, "stop_token_ids", "x"]), JSON)
)
def test_any_request_is_accepted_or_refused(fields):
    with contextlib.suppress(EngineError):
        parsed = parse_completion({**completion_body(), **fields}, LIMITS)
        assert 1 <= len(parsed.samples) <= LIMITS.max_samples
