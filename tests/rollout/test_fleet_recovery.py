"""Engines that die and come back, in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time

import pytest
from rollout_engines import TOKEN, call, engine_process, fleet, group

from miles_olmo.base.errors import EngineError
from miles_olmo.rollout.registry import read_registry

pytestmark = pytest.mark.process


def token_ids(groups):
    return [[t.ids for t in made] for made in groups]


async def sample(client, count=6, **fields):
    return token_ids(
        await asyncio.gather(*(client.generate_group(group(i, **fields)) for i in range(count)))
    )


@contextlib.asynccontextmanager
async def restarted(directory):
    """Engine 0 in its second process, started while the event loop goes on."""
    engine = engine_process(directory, 0, attempt=2)
    await asyncio.to_thread(engine.__enter__)
    try:
        yield
    finally:
        engine.__exit__(None, None, None)


def test_an_engine_killed_in_mid_generation_is_replaced_by_the_others(directory, publications):
    async def main(victim):
        async with fleet(directory, count=2) as client:
            await client.wait_ready()
            await client.publish(publications[0])
            expected = await sample(client, max_tokens=40, ignore_stop=True)
            task = asyncio.create_task(sample(client, max_tokens=40, ignore_stop=True))
            await asyncio.sleep(0.1)
            victim.kill()
            assert await task == expected
            assert client.counters["engines_lost"] == 1
            assert client.counters["retries"] == client.counters["connection_faults"] == 3
            # No restart was promised, so the next version cannot reach the whole fleet.
            with pytest.raises(EngineError, match=r"E250.*engine-0"):
                await client.publish(publications[1])

    with (
        engine_process(directory, 0, step_seconds=0.01) as victim,
        engine_process(directory, 1, step_seconds=0.01),
    ):
        asyncio.run(main(victim))


def test_the_only_engine_killed_is_a_named_error_at_once(directory, publications):
    async def main(victim):
        async with fleet(directory) as client:
            await client.wait_ready()
            await client.publish(publications[0])
            task = asyncio.create_task(sample(client, max_tokens=60, ignore_stop=True))
            await asyncio.sleep(0.1)
            victim.kill()
            start = time.monotonic()
            with pytest.raises(EngineError) as caught:
                await task
            assert time.monotonic() - start < 3
            assert caught.value.code == "E224" and f"pid {victim.pid}" in caught.value.what

    with engine_process(directory, 0, step_seconds=0.02) as victim:
        asyncio.run(main(victim))


def test_a_stopped_engine_is_a_named_error_within_its_bound(directory, publications):
    async def main(victim):
        async with fleet(directory, request_seconds=0.5, health_seconds=0.5, retries=1) as client:
            await client.wait_ready()
            await client.publish(publications[0])
            victim.send_signal(signal.SIGSTOP)
            start = time.monotonic()
            with pytest.raises(EngineError, match=r"E224.*engine-0.*not answered within"):
                await client.generate_group(group(1))
            assert time.monotonic() - start < 0.5 * 2 + 1.5

    with engine_process(directory, 0) as victim:
        asyncio.run(main(victim))


def test_a_restarted_engine_gets_the_current_version_before_it_is_used(directory, publications):
    async def main(victim):
        async with fleet(directory, max_restarts=1, startup_seconds=20.0) as client:
            await client.wait_ready()
            await client.publish(publications[0])
            await client.publish(publications[1])
            expected = await sample(client, max_tokens=40, ignore_stop=True)
            task = asyncio.create_task(sample(client, max_tokens=40, ignore_stop=True))
            await asyncio.sleep(0.1)
            victim.kill()
            victim.wait()
            async with restarted(directory):
                assert await task == expected
                assert client.counters["engines_lost"] == client.counters["engines_returned"] == 1
                url = read_registry(directory)[0].url
                assert call(url, "GET", "/weight_version", token=TOKEN)[1] == {"weight_version": 2}
                await client.audit(publications[1])
                await client.publish(publications[0])

    with engine_process(directory, 0, step_seconds=0.01) as victim:
        asyncio.run(main(victim))


def test_a_publication_waits_for_the_only_engine_when_it_may_be_restarted(directory, publications):
    async def main(victim):
        async with fleet(directory, max_restarts=1, startup_seconds=20.0) as client:
            await client.wait_ready()
            await client.publish(publications[0])
            victim.kill()
            victim.wait()
            task = asyncio.create_task(client.publish(publications[1]))
            await asyncio.sleep(0.3)
            assert not task.done()
            async with restarted(directory):
                await task
                await client.audit(publications[1])
                assert client.counters["engines_returned"] == 1
                await sample(client)

    with engine_process(directory, 0) as victim:
        asyncio.run(main(victim))


def test_a_publication_ends_when_the_only_engine_never_comes_back(directory, publications):
    async def main(victim):
        async with fleet(directory, max_restarts=1, startup_seconds=1.0) as client:
            await client.wait_ready()
            await client.publish(publications[0])
            victim.kill()
            victim.wait()
            start = time.monotonic()
            with pytest.raises(EngineError, match=r"E224.*version 2 reached nobody"):
                await client.publish(publications[1])
            assert time.monotonic() - start < 4

    with engine_process(directory, 0) as victim:
        asyncio.run(main(victim))


def test_a_publication_leaves_out_an_engine_that_may_be_restarted(directory, publications):
    async def main(victim):
        async with fleet(directory, count=2, max_restarts=1, startup_seconds=20.0) as client:
            await client.wait_ready()
            await client.publish(publications[0])
            victim.kill()
            victim.wait()
            await client.publish(publications[1])
            assert client.counters["engines_excluded"] == client.counters["engines_lost"] == 1
            expected = await sample(client)
            with engine_process(directory, 0, attempt=2):
                assert await sample(client) == expected
                assert client.counters["engines_returned"] == 1
                assert (await client.health()) == {0: "ok", 1: "ok"}
                await client.audit(publications[1])

    with engine_process(directory, 0) as victim, engine_process(directory, 1):
        asyncio.run(main(victim))


def test_an_engine_restarted_behind_our_back_with_old_weights_is_refused(directory, publications):
    """Same address, same registry entry, older version: the answer itself gives it away."""

    async def main(victim, port):
        async with fleet(directory) as client:
            await client.wait_ready()
            await client.publish(publications[0])
            await client.publish(publications[1])
            entry = (directory / "engine-0.json").read_bytes()
            victim.kill()
            victim.wait()
            with engine_process(directory, 0, attempt=2, port=port):
                (directory / "engine-0.json").write_bytes(entry)
                url = read_registry(directory)[0].url
                old = {"update_info": publications[0].update_info()}
                for path, body in (
                    ("/start_weight_update", {}),
                    ("/update_weights", old),
                    ("/finish_weight_update", {}),
                ):
                    assert call(url, "POST", path, body)[0] == 200
                with pytest.raises(EngineError, match=r"E238.*version 1 answered, version 2"):
                    await client.generate_group(group(1))

    with engine_process(directory, 0) as victim:
        port = int(read_registry(directory)[0].url.rsplit(":", 1)[1])
        asyncio.run(main(victim, port))


def test_an_engine_without_weights_behind_the_same_entry_gets_them(directory, publications):
    async def main(victim, port):
        async with fleet(directory) as client:
            await client.wait_ready()
            await client.publish(publications[0])
            expected = await sample(client)
            entry = (directory / "engine-0.json").read_bytes()
            victim.kill()
            victim.wait()
            with engine_process(directory, 0, attempt=2, port=port):
                (directory / "engine-0.json").write_bytes(entry)
                assert await sample(client) == expected
                assert client.counters["server_faults"] >= 1
                assert client.counters["engines_returned"] == 1

    with engine_process(directory, 0) as victim:
        port = int(read_registry(directory)[0].url.rsplit(":", 1)[1])
        asyncio.run(main(victim, port))


def test_an_engine_whose_model_failed_is_replaced(directory, publications):
    async def main():
        async with fleet(directory, count=2) as client:
            await client.wait_ready()
            await client.publish(publications[0])
            results = [await sample(client) for _ in range(3)]
            assert results[0] == results[1] == results[2]
            assert client.counters["engines_lost"] == 1
            assert client.counters["server_faults"] >= 1

    with engine_process(directory, 0, fail_at_step=6), engine_process(directory, 1):
        asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_engine_in_good_order(directory, number):
    with engine_process(directory, 0) as process:
        process.send_signal(number)
        assert process.wait(5) == 0
