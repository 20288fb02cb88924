from __future__ import annotations

import time

import pytest
from rollout_engines import hold_half_sampled, in_background
from table_model import sample_alone

from miles_olmo.wire.generation import SamplingRequest


def test_update_is_refused_while_a_sequence_is_half_sampled(engine, publications):
    running = hold_half_sampled(engine)
    status, answer = engine.call("POST", "/start_weight_update", {})
    assert (status, answer["error"]["miles"]["code"]) == (409, "E208")
    engine.call("POST", "/pause?mode=keep")
    assert engine.call("POST", "/start_weight_update", {})[0] == 409
    engine.call("POST", "/resume")
    assert running.result(10)[1]["weight_version"] == 1


def test_completions_during_an_update_wait_when_paused_and_get_503_when_not(engine, publications):
    engine.call("POST", "/start_weight_update", {})
    status, answer = engine.complete()
    assert (status, answer["error"]["miles"]["code"]) == (503, "E207")
    engine.call("POST", "/pause?mode=wait")
    waiting = in_background(engine.complete)
    update = {"update_info": publications[1].update_info()}
    assert engine.call("POST", "/update_weights", update)[0] == 200
    time.sleep(0.1)
    assert engine.call("GET", "/weight_version")[1] == {"weight_version": 1}
    assert engine.call("POST", "/finish_weight_update", {})[1] == {"weight_version": 2}
    assert not waiting.done()
    engine.call("POST", "/resume")
    answer = waiting.result(5)[1]
    expected = sample_alone(SamplingRequest((3, 1, 4), 5, 1.0, 11, ()), 2)
    assert answer["weight_version"] == 2
    assert answer["choices"][0]["token_ids"] == list(expected.token_ids)


def test_update_may_come_in_parts(engine, publications):
    info = publications[1].update_info()
    engine.call("POST", "/start_weight_update", {})
    for i, name in enumerate(info["names"]):
        part = {
            **info,
            "names": [name],
            "dtype_names": ["F32"],
            "shapes": [info["shapes"][i]],
            "paths": [info["paths"][i]],
            "checksums": {name: info["checksums"][name]},
        }
        assert engine.call("POST", "/update_weights", {"update_info": part})[0] == 200
    assert engine.call("POST", "/finish_weight_update", {})[1] == {"weight_version": 2}


def _without(info, key):
    return {name: value for name, value in info.items() if name != key}


def _first_tensor_only(info):
    name = info["names"][0]
    return {
        **info,
        "names": [name],
        "dtype_names": ["F32"],
        "shapes": info["shapes"][:1],
        "checksums": {name: info["checksums"][name]},
    }


BROKEN_UPDATES = {
    "tensor missing": _first_tensor_only,
    "tensor twice": lambda i: {
        **i,
        "names": i["names"] + i["names"][:1],
        "dtype_names": i["dtype_names"] + ["F32"],
        "shapes": i["shapes"] + i["shapes"][:1],
    },
    "tensor unknown": lambda i: {
        **i,
        "names": ["other.weight", *i["names"][1:]],
        "checksums": {**_without(i["checksums"], i["names"][0]), "other.weight": "0" * 64},
    },
    "wrong checksum": lambda i: {**i, "checksums": dict.fromkeys(i["names"], "0" * 64)},
    "file absent": lambda i: {**i, "paths": [*i["paths"][:-1], "/nowhere/weights.safetensors"]},
    "file not named": lambda i: {**i, "paths": i["paths"][:1]},
    "relative path": lambda i: {**i, "paths": ["weights-00001.safetensors"]},
    "no version": lambda i: _without(i, "weight_version"),
    "no checksums": lambda i: _without(i, "checksums"),
    "shapes too few": lambda i: {**i, "shapes": i["shapes"][:1]},
    "not an object": lambda i: [],
}


@pytest.mark.parametrize("kind", BROKEN_UPDATES)
def test_a_failed_or_partial_update_leaves_the_old_version_serving(engine, publications, kind):
    before = engine.complete()[1]["choices"]
    engine.call("POST", "/pause?mode=wait")
    engine.call("POST", "/start_weight_update", {})
    info = BROKEN_UPDATES[kind](publications[1].update_info())
    update_status, update = engine.call("POST", "/update_weights", {"update_info": info})
    status, finish = engine.call("POST", "/finish_weight_update", {})
    assert status in (400, 409)
    first_error = (finish if update_status == 200 else update)["error"]["miles"]
    assert first_error["code"] == "E209"
    # The update is closed: a second finish has nothing to finish.
    assert engine.call("POST", "/finish_weight_update", {})[1]["error"]["miles"]["code"] == "E208"
    engine.call("POST", "/resume")
    answer = engine.complete()[1]
    assert answer["weight_version"] == 1 and answer["choices"] == before
    assert engine.call("GET", "/weight_checksums")[1]["checksums"] == publications[0].checksums
    engine.publish(publications[1])
    assert engine.complete()[1]["weight_version"] == 2


def test_a_missing_tensor_is_named(engine, publications):
    engine.call("POST", "/start_weight_update", {})
    info = _first_tensor_only(publications[1].update_info())
    engine.call("POST", "/update_weights", {"update_info": info})
    error = engine.call("POST", "/finish_weight_update", {})[1]["error"]["miles"]
    assert error["details"]["missing"] == ["router.weight"]


def test_resume_gives_up_an_open_update_and_says_so(engine, publications):
    engine.call("POST", "/pause?mode=wait")
    engine.call("POST", "/start_weight_update", {})
    engine.call("POST", "/update_weights", {"update_info": publications[1].update_info()})
    assert engine.call("POST", "/resume")[1]["gave_up_update"] is True
    assert engine.complete()[1]["weight_version"] == 1
    assert engine.call("POST", "/finish_weight_update", {})[0] == 409
