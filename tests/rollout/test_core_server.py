from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from rollout_engines import (
    LIMITS,
    TOKEN,
    EngineThread,
    completion_body,
    engine_process,
    hold_half_sampled,
    in_background,
    wait_until,
)
from starlette.routing import Route
from table_model import LAYERS, TOP_K, TableModel, sample_alone

from miles_olmo.base.errors import EngineError
from miles_olmo.rollout.core_server import CoreServer, create_app
from miles_olmo.rollout.core_state import CoreEngine
from miles_olmo.rollout.registry import read_registry
from miles_olmo.wire.generation import SamplingRequest
from miles_olmo.wire.protocol import decode_routes


def test_completion_has_vllms_shape_and_the_models_tokens(shared_engine):
    status, answer = shared_engine.complete(n=3, seed=11, stop_token_ids=[7])
    assert status == 200
    assert answer["weight_version"] == 1 and answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for index, choice in enumerate(answer["choices"]):
        expected = sample_alone(SamplingRequest((3, 1, 4), 5, 1.0, 11 + index, (7,)), 1)
        assert choice["token_ids"] == list(expected.token_ids)
        assert choice["logprobs"]["token_logprobs"] == list(expected.logprobs)
        assert choice["finish_reason"] == expected.finish_reason
        assert choice["prompt_token_ids"] == [3, 1, 4]
        routes = decode_routes(choice["routed_experts"])
        assert routes.dtype == np.uint8
        assert routes.shape == (3 + len(expected.token_ids) - 1, LAYERS, TOP_K)
        assert (routes == expected.routes).all()
    sampled = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == sampled


def test_stop_token_ends_the_answer_and_is_part_of_it(shared_engine):
    greedy = shared_engine.complete(temperature=0, max_tokens=4)[1]["choices"][0]["token_ids"]
    choice = shared_engine.complete(temperature=0, max_tokens=4, stop_token_ids=[greedy[1]])[1][
        "choices"
    ][0]
    assert choice["token_ids"] == greedy[:2]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", greedy[1])


def test_ignore_eos_samples_the_whole_budget(shared_engine):
    choice = shared_engine.complete(ignore_eos=True, max_tokens=20)[1]["choices"][0]
    assert len(choice["token_ids"]) == 20 and choice["finish_reason"] == "length"


def test_fields_not_asked_for_are_left_out(shared_engine):
    choice = shared_engine.complete(logprobs=..., return_token_ids=...)[1]["choices"][0]
    assert choice["logprobs"] is None and choice["token_ids"] is None


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": True},
        {"stream": True},
        {"echo": True},
        {"stop": ["\n"]},
        {"logprobs": 1},
        {"logprobs": True},
        {"guided_json": {}},
        {"model": "another"},
        {"prompt": "text"},
        {"prompt": []},
        {"prompt": [[3, 1], [4]]},
        {"prompt": [1, True]},
        {"prompt": ...},
        {"n": 0},
        {"n": 2.0},
        {"n": 10_000},
        {"max_tokens": 0},
        {"max_tokens": ...},
        {"seed": ...},
        {"seed": -1},
        {"seed": 2**63},
        {"temperature": -0.5},
        {"temperature": None},
        {"temperature": float("nan")},
        {"ignore_eos": 1},
        {"ignore_eos": True, "stop_token_ids": [7]},
        {"routed_experts_prompt_start": 2},
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(shared_engine, fields):
    status, answer = shared_engine.complete(**fields)
    assert status == 400
    assert answer["error"]["miles"]["code"] == "E204"
    assert next(iter(fields)) in answer["error"]["message"]


def test_neutral_values_are_accepted(shared_engine):
    plain = shared_engine.complete()[1]["choices"]
    neutral = shared_engine.complete(
        top_p=1.0, top_k=-1, stream=False, echo=False, min_p=0.0, stop=None
    )
    assert neutral[1]["choices"] == plain


@pytest.mark.parametrize(
    "fields",
    [{"prompt": [3, 32]}, {"prompt": [-1]}, {"stop_token_ids": [99]}, {"max_tokens": 62}],
    ids=str,
)
def test_ids_and_lengths_outside_the_model_are_refused(shared_engine, fields):
    status, answer = shared_engine.complete(**fields)
    assert (status, answer["error"]["miles"]["code"]) == (400, "E205")


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff", b'"text"', b"x" * (17 * 2**20)])
def test_bodies_that_are_no_request_are_refused(shared_engine, body):
    status, answer = shared_engine.call("POST", "/v1/completions", body)
    assert (status, answer["error"]["miles"]["code"]) == (400, "E204")


def test_every_route_but_health_needs_the_token():
    app = create_app(CoreEngine(TableModel(), LIMITS), TOKEN)
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) == len(app.routes) == 14
    wrong_tokens = [None, "", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "é"]
    with EngineThread() as engine:
        for route in routes:
            method = "POST" if "POST" in (route.methods or ()) else "GET"
            for token in wrong_tokens:
                status, _ = engine.call(
                    method, route.path, token=token and token.encode("utf-8").decode("latin-1")
                )
                assert status == (200 if route.path == "/health" else 401), (route.path, token)
            assert engine.call(method, route.path)[0] != 401
        for path in ("/nothing", "/health/", "//health", "/HEALTH", "/docs", "/openapi.json"):
            assert engine.call("GET", path, token=None)[0] == 401, path
        assert engine.call("POST", "/health", token=None)[0] == 401


def test_token_must_come_as_one_bearer_header(shared_engine):
    def status(*headers: tuple[str, str]) -> int:
        connection = http.client.HTTPConnection(
            shared_engine.url.removeprefix("http://"), timeout=10
        )
        connection.putrequest("GET", "/version")
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        code = connection.getresponse().status
        connection.close()
        return code

    assert status(("Authorization", f"Bearer {TOKEN}")) == 200
    assert status(("Authorization", TOKEN)) == 401
    assert status(("Authorization", f"Basic {TOKEN}")) == 401
    assert status(("X-Api-Key", TOKEN)) == 401
    twice = ("Authorization", f"Bearer {TOKEN}")
    assert status(twice, ("Authorization", "Bearer other")) == 401


def test_nothing_is_served_before_the_first_version(publications):
    with EngineThread() as engine:
        assert engine.call("GET", "/weight_version") == (200, {"weight_version": None})
        status, answer = engine.complete()
        assert (status, answer["error"]["miles"]["code"]) == (503, "E206")
        engine.publish(publications[0])
        assert engine.complete()[0] == 200


def test_descriptive_endpoints(engine, publications):
    assert engine.call("GET", "/health") == (200, {"status": "ok"})
    assert isinstance(engine.call("GET", "/version")[1]["version"], str)
    assert engine.call("GET", "/v1/models")[1]["data"][0]["max_model_len"] == 64
    assert engine.call("GET", "/weight_version")[1] == {"weight_version": 1}
    held = engine.call("GET", "/weight_checksums")[1]
    assert held == {"weight_version": 1, "checksums": publications[0].checksums}


def test_pause_wait_lets_sequences_finish_and_holds_new_ones(engine):
    running = hold_half_sampled(engine)
    assert engine.call("POST", "/pause?mode=wait&clear_cache=true")[0] == 200
    assert running.done() or running.result(1)
    assert running.result()[1]["choices"][0]["finish_reason"] == "length"
    assert engine.call("GET", "/is_paused")[1] == {"is_paused": True}
    assert engine.model.num_cache_drops == 1
    waiting = in_background(engine.complete)
    time.sleep(0.2)
    assert not waiting.done() and engine.model.num_unfinished == 0
    engine.call("POST", "/resume")
    assert waiting.result(5)[0] == 200


def test_pause_abort_returns_what_was_sampled(engine):
    running = hold_half_sampled(engine, n=2)
    assert engine.call("POST", "/pause?mode=abort&clear_cache=false")[0] == 200
    status, answer = running.result(5)
    assert status == 200 and engine.model.num_cache_drops == 0
    for index, choice in enumerate(answer["choices"]):
        assert choice["finish_reason"] == "abort"
        expected = sample_alone(SamplingRequest((3, 1, 4), 60, 1.0, 11 + index, ()), 1).token_ids
        num_tokens = len(choice["token_ids"])
        assert 1 <= num_tokens < 60 and choice["token_ids"] == list(expected[:num_tokens])
        assert len(decode_routes(choice["routed_experts"])) == 3 + num_tokens - 1


def test_pause_keep_freezes_and_resume_goes_on_with_the_same_tokens(engine):
    running = hold_half_sampled(engine)
    assert engine.call("POST", "/pause?mode=keep&clear_cache=true")[0] == 200
    steps = engine.model.num_steps
    time.sleep(0.15)
    assert engine.model.num_steps <= steps + 1 and not running.done()
    engine.call("POST", "/resume")
    expected = sample_alone(SamplingRequest((3, 1, 4), 60, 1.0, 11, ()), 1)
    assert running.result(10)[1]["choices"][0]["token_ids"] == list(expected.token_ids)


def test_pause_with_an_unknown_mode_is_refused(shared_engine):
    assert shared_engine.call("POST", "/pause?mode=later")[0] == 400
    assert shared_engine.call("POST", "/pause?mode=wait&clear_cache=maybe")[0] == 400
    assert shared_engine.call("GET", "/is_paused")[1] == {"is_paused": False}


def test_health_answers_at_once_while_the_model_is_slow(publications):
    with EngineThread(TableModel(step_seconds=0.4)) as engine:
        engine.publish(publications[0])
        slow = in_background(engine.complete)
        wait_until(lambda: engine.model.num_unfinished > 0)
        start = time.monotonic()
        for _ in range(5):
            assert engine.call("GET", "/health")[0] == 200
        assert time.monotonic() - start < 0.35  # less than one step
        assert not slow.done() and slow.result(10)[0] == 200


def test_64_requests_at_once_get_what_each_would_get_alone(publications):
    with EngineThread(TableModel(max_batch_size=16)) as engine:
        engine.publish(publications[0])
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(lambda seed: engine.complete(seed=100 * seed, n=2), range(64)))
        for seed, (status, answer) in enumerate(answers):
            assert status == 200
            for index, choice in enumerate(answer["choices"]):
                request = SamplingRequest((3, 1, 4), 5, 1.0, 100 * seed + index, ())
                assert choice["token_ids"] == list(sample_alone(request, 1).token_ids)
        assert len(engine.model.threads) == 1
        assert engine.model.num_steps < 64 * 2 * 5  # they were batched


def test_a_client_that_leaves_aborts_its_sequences_only(engine):
    staying = hold_half_sampled(engine)
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=10)
    connection.request(
        "POST",
        "/v1/completions",
        json.dumps(completion_body(n=3, max_tokens=60)),
        {"Authorization": f"Bearer {TOKEN}"},
    )
    wait_until(lambda: engine.model.num_unfinished == 4)
    connection.close()
    wait_until(lambda: engine.model.num_unfinished == 1)
    assert not staying.done() and staying.result(10)[0] == 200
    wait_until(lambda: engine.server.engine.num_unfinished == 0)


def test_a_client_that_leaves_while_paused_is_forgotten(engine):
    engine.call("POST", "/pause?mode=wait")
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"), timeout=10)
    body = json.dumps(completion_body())
    connection.request("POST", "/v1/completions", body, {"Authorization": f"Bearer {TOKEN}"})
    time.sleep(0.1)
    connection.close()
    time.sleep(0.1)
    steps = engine.model.num_steps
    engine.call("POST", "/resume")
    time.sleep(0.1)
    assert engine.model.num_steps == steps


def test_a_fault_in_the_model_is_told_to_everyone(publications):
    with EngineThread(TableModel(fail_at_step=3, step_seconds=0.02)) as engine:
        engine.publish(publications[0])
        status, answer = engine.complete()
        assert status == 500 and "scripted fault" in answer["error"]["message"]
        assert engine.call("GET", "/health")[0] == 500
        assert "scripted fault" in engine.complete()[1]["error"]["message"]
        wait_until(lambda: engine.error is not None)
    assert isinstance(engine.error, EngineError) and engine.error.code == "E203"


def test_a_process_whose_model_failed_exits_non_zero(tmp_path, publications):
    with engine_process(tmp_path / "engines", fail_at_step=1) as process:
        engine = EngineThread.__new__(EngineThread)
        engine.url = read_registry(tmp_path / "engines")[0].url
        engine.publish(publications[0])
        assert engine.complete()[0] == 500
        assert process.wait(10) == 6
        assert process.stderr is not None
        assert "scripted fault" in process.stderr.read()


def test_a_taken_port_is_named(shared_engine):
    port = int(shared_engine.url.rsplit(":", 1)[1])
    with pytest.raises(EngineError) as caught:
        CoreServer(TableModel(), token=TOKEN, port=port, on_bound=print, limits=LIMITS)
    assert caught.value.code == "E201" and str(port) in str(caught.value)


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(EngineError) as caught:
        CoreServer(TableModel(), token=TOKEN, host="192.0.2.1", on_bound=print, limits=LIMITS)
    assert caught.value.code == "E201"


def test_stopping_does_not_wait_for_long_answers(publications):
    with EngineThread(TableModel(step_seconds=0.2)) as engine:
        engine.publish(publications[0])
        in_background(lambda: engine.complete(max_tokens=60))
        wait_until(lambda: engine.model.num_unfinished > 0)
        start = time.monotonic()
        engine.server.stop()
        wait_until(lambda: not engine._thread.is_alive())
        assert time.monotonic() - start < 5
    assert threading.active_count() < 50
