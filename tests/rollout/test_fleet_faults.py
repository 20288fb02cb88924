"""Answers that are wrong, late or missing, from a real server in front of a real engine."""

from __future__ import annotations

import asyncio
import time

import pytest
from rollout_engines import (
    changed,
    dribble,
    engines,
    error_500,
    fleet,
    group,
    half_answer,
    hang,
    proxied,
    reset,
    started,
    times,
    until,
)
from table_model import sample_alone

from miles_olmo.base.errors import EngineError
from miles_olmo.wire.generation import SamplingRequest


def _each_choice(**fields):
    return changed(lambda answer: [c.update(fields) for c in answer["choices"]] and None)


PROTOCOL_FAULTS = {
    "E231": changed(lambda answer: answer["choices"].pop() and None),
    "E232": _each_choice(prompt_token_ids=[1]),
    "E234": _each_choice(token_ids=[1] * 9, logprobs={"token_logprobs": [-1.0] * 9}),
    "E238": changed(lambda answer: answer.update(weight_version=0)),
    "E240": _each_choice(routed_experts=None),
    "E230": changed(lambda answer: "oops"),
}


@pytest.mark.parametrize("code", PROTOCOL_FAULTS)
def test_a_wrong_answer_is_an_error_at_once_and_never_retried(directory, publications, code):
    async def main(running):
        async with proxied(directory, running) as (proxy,), fleet(directory) as client:
            await started(client, publications[0])
            proxy.fault, before = PROTOCOL_FAULTS[code], proxy.num_completions
            with pytest.raises(EngineError, match=rf"{code}: engine-0 at .* group 9") as caught:
                await client.generate_group(group(9))
            assert proxy.num_completions == before + 1
            assert client.counters["answers_refused"] == 1 and client.counters["retries"] == 0
            assert caught.value.exit_code == 6

    with engines(directory, 1) as running:
        asyncio.run(main(running))


@pytest.mark.parametrize("field", ["routed_experts", "token_ids"])
def test_the_first_publication_refuses_an_engine_whose_probe_is_wrong(
    directory, publications, field
):
    async def main(running):
        async with proxied(directory, running) as (proxy,), fleet(directory) as client:
            proxy.fault = _each_choice(**{field: None})
            await client.wait_ready()
            with pytest.raises(EngineError, match=r"E2[34]0"):
                await client.publish(publications[0])
            assert client.version is None and client.counters["publication_failures"] == 1

    with engines(directory, 1) as running:
        asyncio.run(main(running))


@pytest.mark.parametrize(
    ("fault", "counter"),
    [
        (reset, "connection_faults"),
        (half_answer, "connection_faults"),
        (error_500, "server_faults"),
    ],
)
def test_a_passing_fault_samples_the_whole_group_again(directory, publications, fault, counter):
    async def main(running):
        async with proxied(directory, running) as (proxy,), fleet(directory) as client:
            await started(client, publications[0])
            expected = await client.generate_group(group(1))
            proxy.fault = times(2, fault)
            made = await client.generate_group(group(1))
            assert [t.ids for t in made] == [t.ids for t in expected]
            assert client.counters["retries"] == client.counters[counter] == 2
            assert client.counters["groups"] == 2 and client.counters["engines_lost"] == 0

    with engines(directory, 1) as running:
        asyncio.run(main(running))


def test_an_aborted_answer_is_sampled_again_whole(directory, publications):
    async def main(running):
        async with fleet(directory) as client:
            await started(client, publications[0])
            request = group(1, max_tokens=50, ignore_stop=True)
            task = asyncio.create_task(client.generate_group(request))
            await until(lambda: running[0].model.num_unfinished == 4)
            await asyncio.to_thread(running[0].call, "POST", "/pause?mode=abort")
            await asyncio.to_thread(running[0].call, "POST", "/resume")
            made = await task
            assert client.counters["aborted"] == client.counters["retries"] == 1
            return made

    with engines(directory, 1, step_seconds=0.01) as running:
        made = asyncio.run(main(running))
    expected = sample_alone(SamplingRequest((3, 1, 4), 50, 1.0, 1000, (), True), 1)
    assert made[0].segments[1].ids == expected.token_ids


def test_a_fault_that_stays_is_an_error_that_tells_every_attempt(directory, publications):
    async def main(running):
        async with proxied(directory, running) as (proxy,), fleet(directory) as client:
            await started(client, publications[0])
            proxy.fault = error_500
            with pytest.raises(EngineError) as caught:
                await client.generate_group(group(1))
            assert caught.value.code == "E222" and caught.value.what.count("out of memory") == 3
            assert client.counters["group_failures"] == 1 and client.counters["groups"] == 0

    with engines(directory, 1) as running:
        asyncio.run(main(running))


@pytest.mark.parametrize("fault", [hang, dribble])
def test_a_hanging_engine_is_a_named_error_within_its_bound(directory, publications, fault):
    async def main(running):
        async with (
            proxied(directory, running) as (proxy,),
            fleet(directory, request_seconds=0.3, retries=1) as client,
        ):
            await started(client, publications[0])
            proxy.fault = fault
            start = time.monotonic()
            with pytest.raises(EngineError) as caught:
                await client.generate_group(group(1))
            assert time.monotonic() - start < 0.3 * 2 + 2.0
            assert caught.value.code == "E223" and "engine-0" in caught.value.what
            assert client.counters["timeouts"] == 2

    with engines(directory, 1) as running:
        asyncio.run(main(running))


def test_another_engine_takes_over_from_a_hanging_one(directory, publications):
    async def main(running):
        async with (
            proxied(directory, running) as proxies,
            fleet(directory, count=2, request_seconds=1.0, retries=1) as client,
        ):
            await started(client, publications[0])
            expected = [await client.generate_group(group(i)) for i in range(4)]
            proxies[0].fault = hang
            made = await asyncio.gather(*(client.generate_group(group(i)) for i in range(4)))
            assert [[t.ids for t in g] for g in made] == [[t.ids for t in g] for g in expected]
            assert client.counters["timeouts"] == client.counters["retries"] == 2

    with engines(directory, 2) as running:
        asyncio.run(main(running))


def test_busy_generation_does_not_delay_health(directory, publications, monkeypatch):
    monkeypatch.setattr("miles_olmo.rollout.transport.MAX_GENERATIONS", 8)

    async def main(running):
        async with proxied(directory, running) as (proxy,), fleet(directory) as client:
            await started(client, publications[0])
            proxy.fault = hang
            stuck = [asyncio.create_task(client.generate_group(group(i))) for i in range(40)]
            await until(lambda: proxy.num_completions >= 1 + 8)  # the probe, and a full pool
            await asyncio.sleep(0.1)
            assert proxy.num_completions == 1 + 8
            start = time.monotonic()
            assert await client.health() == {0: "ok"}
            assert time.monotonic() - start < 1.0
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)

    with engines(directory, 1) as running:
        asyncio.run(main(running))
