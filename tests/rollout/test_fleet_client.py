from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_engines import EngineThread, announce, engines, fleet, group, proxied, started, until
from table_model import sample_alone

from miles_olmo.base.errors import EngineError
from miles_olmo.wire.generation import SamplingRequest


def test_a_group_holds_the_tokens_of_seed_prompt_and_weights(directory, publications):
    async def main():
        async with fleet(directory) as client:
            await started(client, publications[0])
            return await client.generate_group(group(3))

    with engines(directory, 1):
        trajectories = asyncio.run(main())
    assert [t.sample_id for t in trajectories] == ["3.0", "3.1", "3.2", "3.3"]
    for index, made in enumerate(trajectories):
        expected = sample_alone(SamplingRequest((3, 1, 4), 6, 1.0, 3000 + index, (7,)), 1)
        assert made.segments[1].ids == expected.token_ids
        assert made.segments[1].logprobs == expected.logprobs
        assert made.finish_reason == expected.finish_reason
        assert made.oldest_version == 1
        assert made.text == " ".join(map(str, expected.token_ids))


def test_results_do_not_depend_on_the_number_of_engines_or_on_load(directory, publications):
    async def main(count):
        async with fleet(directory, count=count) as client:
            await started(client, publications[0])
            made = await asyncio.gather(*(client.generate_group(group(i)) for i in range(64)))
            assert client.counters["groups"] == 64 and client.counters["retries"] == 0
            return [[(t.sample_id, t.ids, t.segments[1].logprobs) for t in g] for g in made]

    results, steps = [], []
    for count in (1, 3):
        with engines(directory, count) as running:
            results.append(asyncio.run(main(count)))
            steps.append([engine.model.num_steps for engine in running])
    assert results[0] == results[1]
    assert all(number > 2 for number in steps[1])  # every engine served some


def test_a_new_version_is_sampled_after_it_is_published(directory, publications):
    async def main():
        async with fleet(directory, count=2) as client:
            await started(client, publications[0])
            before = await client.generate_group(group(1))
            await started(client, publications[1])
            after = await client.generate_group(group(1))
            assert client.version == 2 and client.counters["publications"] == 2
            return before, after

    with engines(directory, 2) as running:
        before, after = asyncio.run(main())
        assert [e.call("GET", "/is_paused")[1]["is_paused"] for e in running] == [False, False]
    assert {t.oldest_version for t in before} == {1} and {t.oldest_version for t in after} == {2}
    assert [t.ids for t in before] != [t.ids for t in after]


def test_groups_asked_for_during_a_publication_get_one_version_each(directory, publications):
    async def main():
        async with fleet(directory, count=2) as client:
            await started(client, publications[0])
            early = [asyncio.create_task(client.generate_group(group(i))) for i in range(8)]
            await asyncio.sleep(0.02)
            publishing = asyncio.create_task(client.publish(publications[1]))
            await asyncio.sleep(0)
            late = [asyncio.create_task(client.generate_group(group(i))) for i in range(8)]
            await publishing
            versions = [
                {t.oldest_version for made in await asyncio.gather(*tasks) for t in made}
                for tasks in (early, late)
            ]
            assert versions == [{1}, {2}] and client.counters["retries"] == 0

    with engines(directory, 2, step_seconds=0.02):
        asyncio.run(main())


def test_engines_that_never_come_are_named(directory):
    async def main():
        async with fleet(directory, count=3, startup_seconds=0.5) as client:
            with pytest.raises(EngineError) as caught:
                await client.wait_ready()
            return caught.value

    with engines(directory, 1):
        announce(directory, 1, "http://127.0.0.1:9")  # registered, does not listen
        error = asyncio.run(main())
    assert error.code == "E220" and error.details["engines"] == [1, 2]
    assert "engine-1" in error.what and "engine-2 has not registered" in error.what


def test_engines_that_come_late_are_waited_for(directory, publications):
    async def main():
        async with fleet(directory) as client:
            waiting = asyncio.create_task(client.wait_ready())
            await asyncio.sleep(0.3)
            assert not waiting.done()
            announce(directory, 0, running.url)
            await asyncio.wait_for(waiting, 2)

    with EngineThread() as running:
        asyncio.run(main())


def test_the_token_of_another_run_is_refused_at_the_start(directory):
    async def main():
        async with fleet(directory, token="another") as client:
            with pytest.raises(EngineError, match=r"E225.*401"):
                await client.wait_ready()

    with engines(directory, 1):
        asyncio.run(main())


def test_another_program_at_a_registered_address_is_refused(directory):
    async def main(running):
        async with proxied(directory, running) as (proxy,), fleet(directory) as client:
            proxy.answers["/version"] = ["something else"]
            with pytest.raises(EngineError, match="E221: engine-0"):
                await client.wait_ready()

    with engines(directory, 1) as running:
        asyncio.run(main(running))


def test_a_request_that_the_engine_refuses_is_not_repeated(directory, publications):
    async def main():
        async with fleet(directory) as client:
            await started(client, publications[0])
            with pytest.raises(EngineError, match=r"E225.*exceed the longest sequence"):
                await client.generate_group(group(max_tokens=1000))
            assert client.counters["retries"] == 0

    with engines(directory, 1):
        asyncio.run(main())


def test_a_group_before_the_first_publication_is_an_error(directory):
    async def main():
        async with fleet(directory) as client:
            await client.wait_ready()
            with pytest.raises(EngineError, match="E226"):
                await client.generate_group(group())

    with engines(directory, 1):
        asyncio.run(main())


def test_a_group_that_is_given_up_leaves_nothing_running(directory, publications):
    async def main(running):
        async with fleet(directory) as client:
            await started(client, publications[0])
            request = group(1, max_tokens=60, ignore_stop=True)
            task = asyncio.create_task(client.generate_group(request))
            await until(lambda: running[0].model.num_unfinished == 4)
            task.cancel()
            await until(lambda: running[0].model.num_unfinished == 0)
            assert running[0].model.num_steps < 50  # dropped, not finished

    with engines(directory, 1, step_seconds=0.02) as running:
        asyncio.run(main(running))


def test_a_publication_that_one_engine_refuses_leaves_the_old_version(directory, publications):
    async def main(running):
        async with fleet(directory, count=2) as client:
            await started(client, publications[0])
            expected = await client.generate_group(group(1))
            path = Path(publications[1].paths[1])
            path.write_bytes(path.read_bytes()[:-4] + b"\x00\x00\x00\x01")
            with pytest.raises(
                EngineError, match="E250: version 2 did not reach engine-"
            ) as caught:
                await client.publish(publications[1])
            assert "checksum" in caught.value.what and caught.value.details["kind"] == "refused"
            assert client.version == 1 and client.counters["publication_failures"] == 1
            made = await client.generate_group(group(1))
            assert [t.ids for t in made] == [t.ids for t in expected]
            assert {t.oldest_version for t in made} == {1}

    with engines(directory, 2) as running:
        asyncio.run(main(running))


def test_an_engine_that_keeps_another_version_is_an_error(directory, publications):
    async def main(running):
        async with proxied(directory, running) as (proxy,), fleet(directory) as client:
            await client.wait_ready()
            proxy.answers["/weight_version"] = {"weight_version": 0}
            with pytest.raises(EngineError, match="E252"):
                await client.publish(publications[0])

    with engines(directory, 1) as running:
        asyncio.run(main(running))


def test_audit_lists_missing_extra_and_different_tensors(directory, publications):
    async def main():
        async with fleet(directory, count=2) as client:
            await started(client, publications[0])
            with pytest.raises(EngineError) as caught:
                await client.audit(publications[1])
            assert caught.value.code == "E251"
            names = sorted(publications[1].checksums)
            assert caught.value.details["engines"] == {
                f"engine-{i}": {"different": names} for i in range(2)
            }
            other = publications[0]
            renamed = type(other)(
                1, other.directory, (*other.tensors[1:], _renamed(other.tensors[0]))
            )
            with pytest.raises(EngineError) as caught:
                await client.audit(renamed)
            assert caught.value.details["engines"]["engine-1"] == {
                "missing": ["other.weight"],
                "extra": ["bigram.weight"],
            }
            assert "other.weight" in caught.value.what

    with engines(directory, 2):
        asyncio.run(main())


def _renamed(tensor):
    return replace(tensor, name="other.weight")


def test_the_client_imports_no_heavy_module():
    program = (
        "import sys, miles_olmo.rollout.client;"
        "print([m for m in ('torch', 'olmo_core', 'vllm', 'transformers') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.stdout.strip() == "[]", output.stderr
