"""A vLLM server that dies, hangs or lies: recovery or a named error, and never a wrong token."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from miles_olmo.base.errors import EngineError
from miles_olmo.base.processes import descendants, group_members
from miles_olmo.rollout.client import GroupRequest
from tests.model_zoo import random_prompts
from tests_vllm.engines import engine
from tests_vllm.faulty import FAULT_VARIABLE

PROMPTS = random_prompts(6, seed=21)


@pytest.fixture(scope="module")
def breakable(tmp_path_factory):
    directory = tmp_path_factory.mktemp("breakable")
    with engine(
        "softmax router",
        directory,
        environment={FAULT_VARIABLE: str(directory / "fault")},
        arguments=("--middleware", "tests_vllm.faulty.Faulty"),
    ) as made:
        sampled(made)  # the first request is slow, and some tests have short bounds
        yield made


def group(group_id, max_tokens=16):
    return GroupRequest(
        group_id, tuple(PROMPTS[group_id]), 4, max_tokens, 1.0, 7, (), ignore_stop=True
    )


def broken(subject, fault):
    (subject.directory / "fault").write_text(fault)


def sampled(subject, version=1, seed=1, **settings):
    """Groups with their tokens, logprobs and routes."""

    async def work():
        async with subject.client(**settings) as client:
            await client.publish(subject.publication(version, seed))
            answers = await asyncio.gather(*(client.generate_group(group(i)) for i in range(6)))
            return [content(answer) for answer in answers], client.counters

    return asyncio.run(work())


def content(trajectories):
    return [
        (t.ids, t.segments[1].logprobs, t.segments[1].version, t.segments[1].routes.tolist())
        for t in trajectories
    ]


@pytest.mark.parametrize(
    ("fault", "code", "within"),
    [("500", "E222", 5), ("hang", "E223", 10)],
)
def test_a_server_that_fails_for_good_ends_in_a_named_error_in_time(breakable, fault, code, within):
    async def work():
        async with breakable.client(request_seconds=2.0, retries=1, max_restarts=0) as client:
            await client.publish(breakable.publication(1, 1))
            broken(breakable, fault)
            started = time.monotonic()
            with pytest.raises(EngineError, match=code):
                await client.generate_group(group(0))
            assert time.monotonic() - started < within

    try:
        asyncio.run(work())
    finally:
        broken(breakable, "")


@pytest.mark.parametrize("fault", ["500", "hang"])
def test_a_server_that_fails_for_a_moment_is_asked_again_and_gives_the_same_samples(
    breakable, fault
):
    expected, _ = sampled(breakable)

    async def work():
        async with breakable.client(request_seconds=3.0, retries=4) as client:
            await client.publish(breakable.publication(1, 1))
            broken(breakable, fault)
            task = asyncio.create_task(client.generate_group(group(0)))
            await asyncio.sleep(0.3)
            broken(breakable, "")
            return content(await task), client.counters["retries"]

    try:
        answer, retries = asyncio.run(work())
    finally:
        broken(breakable, "")
    assert answer == expected[0]
    assert retries >= 1


@pytest.mark.parametrize(
    ("fault", "code"),
    [("no routes", "E240"), ("no logprobs", "E230"), ("one choice less", "E231")],
)
def test_an_answer_that_lacks_something_is_never_trained_on(breakable, fault, code):
    async def work():
        async with breakable.client() as client:
            await client.publish(breakable.publication(1, 1))
            broken(breakable, fault)
            with pytest.raises(EngineError, match=code):
                await client.generate_group(group(0))
            assert client.counters["answers_refused"] == 1

    try:
        asyncio.run(work())
    finally:
        broken(breakable, "")


def test_weights_that_somebody_else_published_are_noticed_by_their_version(breakable):
    async def work():
        async with breakable.client() as client, breakable.client() as other:
            await client.publish(breakable.publication(5, 1))
            await other.publish(breakable.publication(4, 2))
            with pytest.raises(EngineError, match="E238"):
                await client.generate_group(group(0))

    asyncio.run(work())


@pytest.mark.parametrize("victim", ["server", "worker"])
def test_a_server_killed_while_it_samples_is_replaced_and_the_samples_are_the_same(
    tmp_path, victim
):
    with engine("softmax router", tmp_path) as subject:
        expected, _ = sampled(subject)

        def kill_and_restart():
            time.sleep(0.4)
            os.kill(_victim(subject.server.pid, victim), signal.SIGKILL)
            assert subject.server.wait_for_end().code == "E212"
            subject.server.stop()
            subject.start(attempt=2)

        async def work():
            settings = {"startup_seconds": 240.0, "request_seconds": 20.0, "retries": 6}
            async with subject.client(**settings) as client:
                await client.publish(subject.publication(1, 1))
                killer = threading.Thread(target=kill_and_restart)
                killer.start()
                # Long answers first, so that the kill comes in the middle of them.
                long = [client.generate_group(group(i, max_tokens=64)) for i in range(6)]
                await asyncio.gather(*long)
                answers = await asyncio.gather(*(client.generate_group(group(i)) for i in range(6)))
                await asyncio.to_thread(killer.join)
                return [content(answer) for answer in answers], client.counters

        answers, counters = asyncio.run(work())
    assert answers == expected
    assert counters["engines_lost"] >= 1
    assert counters["engines_returned"] >= 1


OWNER = """
import pathlib, sys, time
from tests_vllm.engines import engine
with engine("softmax router", pathlib.Path(sys.argv[1])) as subject:
    print("server", subject.server.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("also", ["", "server"])
def test_no_process_of_vllm_outlives_the_one_that_started_it(tmp_path, also):
    """A job that is killed with its supervisor leaves nobody who could end what it started."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["", *sys.path]).strip(os.pathsep)},
        text=True,
    )
    assert owner.stdout is not None
    server = next(int(line.split()[1]) for line in owner.stdout if line.startswith("server "))
    started = [identity for identity in descendants(owner.pid) if identity.is_alive]
    assert len(started) >= 2
    if also:
        os.kill(server, signal.SIGKILL)
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 15
    while left := [identity.pid for identity in started if identity.is_alive]:
        assert time.monotonic() < deadline, [_command(pid) for pid in left]
        time.sleep(0.1)


def _victim(server: int, which: str) -> int:
    if which == "server":
        return server
    children = [pid for pid in group_members(os.getpgrp()) if _parent(pid) == server]
    names = {pid: _command(pid) for pid in children}
    return next(pid for pid, name in names.items() if "EngineCore" in name)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
