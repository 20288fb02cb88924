from __future__ import annotations

import asyncio
import statistics
import time

import pytest
from rollout_engines import engine_process, fleet, group
from table_model import write_publication

pytestmark = pytest.mark.process


def test_a_batch_of_16_groups_costs_little_beside_the_model(tmp_path):
    """16 groups of 8 samples of 6 tokens, one server, a model that costs nothing."""
    directory = tmp_path / "engines"

    async def main() -> list[float]:
        async with fleet(directory) as client:
            await client.wait_ready()
            await client.publish(write_publication(tmp_path / "publish", 1))
            seconds = []
            for batch in range(30):
                requests = [
                    group(
                        16 * batch + i,
                        prompt_ids=tuple(range(1, 13)),
                        num_samples=8,
                        ignore_stop=True,
                    )
                    for i in range(16)
                ]
                start = time.perf_counter()
                await asyncio.gather(*(client.generate_group(request) for request in requests))
                seconds.append(time.perf_counter() - start)
            return seconds

    with engine_process(directory, program="instant_engine.py"):
        seconds = asyncio.run(main())
    median = statistics.median(seconds) * 1e3
    print(f"16 groups: median {median:.1f} ms, best {min(seconds) * 1e3:.1f} ms")
    # The target is 15 ms; the bound leaves room for a busy machine, and a 40 ms stall of the
    # socket (Nagle against delayed acknowledgement) still fails it.
    assert min(seconds) < 0.035
