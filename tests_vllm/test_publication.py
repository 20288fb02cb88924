"""Publishing to a live server: versions come and go whole, and a refused one changes nothing."""

import asyncio
import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from miles_olmo.base.errors import EngineError
from miles_olmo.policy.tensor_files import dtype_name, write_tensors
from miles_olmo.rollout.client import GroupRequest
from miles_olmo.wire.publication import PublishedTensor
from tests.model_zoo import random_prompts

PROMPTS = random_prompts(4, seed=9)


def run(work):
    return asyncio.run(work)


def answers(subject):
    return [subject.greedy(prompt) for prompt in PROMPTS]


def publish(subject, publication):
    async def once():
        async with subject.client() as client:
            await client.publish(publication)
            await client.audit(publication)

    run(once())


def group(group_id, *, num_samples=4, max_tokens=8, seed=11):
    return GroupRequest(
        group_id, tuple(PROMPTS[0]), num_samples, max_tokens, 1.0, seed, (), ignore_stop=True
    )


def test_publishing_a_then_b_then_a_gives_the_first_answers_bit_for_bit(shared):
    first = shared.publication(1, seed=1)
    publish(shared, first)
    answers_a = answers(shared)
    publish(shared, shared.publication(2, seed=2))
    answers_b = answers(shared)
    publish(shared, shared.publication(3, seed=1))
    assert answers(shared) == answers_a != answers_b
    assert shared.call("GET", "/weight_version") == (200, {"weight_version": 3})


def changed(publication, directory, change):
    """The same publication with its tensors changed by `change`, checksums of the new bytes."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    tensors = {}
    for path in publication.paths:
        tensors |= load_file(path)
    change(tensors)
    file = write_tensors(directory / "weights-00001.safetensors", tensors)
    listed = tuple(
        PublishedTensor(
            name, dtype_name(tensor.dtype), tuple(tensor.shape), file.tensors[name], file.name
        )
        for name, tensor in tensors.items()
    )
    return dataclasses.replace(
        publication, version=publication.version + 1, directory=str(directory), tensors=listed
    )


def drop(tensors):
    del tensors["model.norm.weight"]


def rename(tensors):
    tensors["model.norm.weights"] = tensors.pop("model.norm.weight")


def reshape(tensors):
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def cast(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()


def poison(tensors):
    tensors["model.layers.0.mlp.experts.7.up_proj.weight"][0, 0] = torch.nan


@pytest.mark.parametrize("change", [drop, rename, reshape, cast, poison])
def test_a_publication_that_is_not_the_policy_is_refused_and_the_old_one_serves_on(
    shared, tmp_path, change
):
    publication = shared.publication(10, seed=4)
    publish(shared, publication)
    before = answers(shared)
    with pytest.raises(EngineError, match="E250") as caught:
        publish(shared, changed(publication, tmp_path / "changed", change))
    assert "refused" in str(caught.value) or "E2" in str(caught.value)
    assert shared.call("GET", "/weight_version") == (200, {"weight_version": 10})
    assert answers(shared) == before
    publish(shared, shared.publication(12, seed=5))  # and the next one is taken
    assert answers(shared) != before


def test_a_file_that_changed_after_it_was_announced_is_refused(shared):
    publication = shared.publication(20, seed=6)
    publish(shared, publication)
    before = answers(shared)
    damaged = shared.publication(21, seed=7)
    path = Path(damaged.paths[0])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(EngineError, match="E250"):
        publish(shared, damaged)
    assert answers(shared) == before


def test_requests_in_flight_during_a_publication_have_one_version_each(shared):
    async def work():
        async with shared.client() as client:
            await client.publish(shared.publication(30, seed=1))
            old = [
                asyncio.create_task(client.generate_group(group(i, max_tokens=48, seed=100 * i)))
                for i in range(8)
            ]
            await asyncio.sleep(0.05)
            publishing = asyncio.create_task(client.publish(shared.publication(31, seed=2)))
            await asyncio.sleep(0)
            new = [
                asyncio.create_task(client.generate_group(group(i, max_tokens=48, seed=100 * i)))
                for i in range(8)
            ]
            await publishing
            return [await task for task in old], [await task for task in new]

    old, new = run(work())
    versions = [
        {segment.version for t in trajectories for segment in t.segments if segment.version}
        for trajectories in (*old, *new)
    ]
    assert versions == [{30}] * 8 + [{31}] * 8
    for before, after in zip(old, new, strict=True):
        assert [t.ids for t in before] != [t.ids for t in after]
        assert all(len(t.ids) == len(PROMPTS[0]) + 48 for t in (*before, *after))


def test_a_plain_http_request_that_is_in_flight_when_the_engine_pauses_keeps_its_version(shared):
    """Not through the client's own gate: the server must keep the order by itself."""
    publish(shared, shared.publication(40, seed=1))
    next_version = shared.publication(41, seed=2)

    async def work():
        body = {
            **{"model": "policy", "prompt": PROMPTS[0], "max_tokens": 64, "n": 8},
            **{"seed": 1, "ignore_eos": True, "logprobs": 0, "return_token_ids": True},
        }
        first = asyncio.create_task(asyncio.to_thread(shared.call, "POST", "/v1/completions", body))
        await asyncio.sleep(0.1)
        async with shared.client() as client:
            publishing = asyncio.create_task(client.publish(next_version))
            await asyncio.sleep(0.02)
            second = asyncio.create_task(
                asyncio.to_thread(shared.call, "POST", "/v1/completions", body)
            )
            await publishing
        return await first, await second

    (status_1, answer_1), (status_2, answer_2) = run(work())
    assert (status_1, status_2) == (200, 200)
    assert answer_1["weight_version"] == 40
    assert answer_2["weight_version"] in (40, 41)

    def tokens(answer):
        return [choice["token_ids"] for choice in answer["choices"]]

    assert (tokens(answer_1) == tokens(answer_2)) == (answer_2["weight_version"] == 40)


def test_an_update_without_a_pause_is_refused_while_something_is_sampled(shared):
    publish(shared, shared.publication(50, seed=1))

    async def work():
        body = {"model": "policy", "prompt": PROMPTS[0], "max_tokens": 200, "ignore_eos": True}
        sampling = asyncio.create_task(
            asyncio.to_thread(shared.call, "POST", "/v1/completions", body)
        )
        await asyncio.sleep(0.1)
        status, answer = await asyncio.to_thread(shared.call, "POST", "/start_weight_update", {})
        await sampling
        return status, answer

    status, answer = run(work())
    assert (status, answer["error"]["miles"]["code"]) == (409, "E208")


def test_updates_out_of_order_are_refused_by_name(shared):
    publish(shared, shared.publication(60, seed=1))
    info = shared.publication(61, seed=2).update_info()
    for path, body in (
        ("/update_weights", {"update_info": info}),
        ("/finish_weight_update", {}),
    ):
        status, answer = shared.call("POST", path, body)
        assert (status, answer["error"]["miles"]["code"]) == (409, "E208")
    assert shared.call("POST", "/start_weight_update", {})[0] == 200
    status, answer = shared.call("POST", "/finish_weight_update", {})
    assert (status, answer["error"]["miles"]["code"]) == (400, "E209")
    assert shared.call("GET", "/weight_version") == (200, {"weight_version": 60})
