from __future__ import annotations

import asyncio
import statistics
import time

import pytest
from rollout_engines import engine_process, fleet, group
from table_model import write_publication

pytestmark = pytest.mark.process

NUM_BATCHES = 30


def test_http_costs_little_beside_the_model(tmp_path):
    """16 groups of 8 samples of 6 tokens, one server, a model that costs nothing (`-s` prints).

    Wall time on a shared machine says little, so the bounds are on processor time (about 9 ms a
    batch when idle) and on the quickest single request, which a stalled socket (40 ms: Nagle
    against delayed acknowledgement) would fail every time.
    """
    directory = tmp_path / "engines"

    async def main() -> tuple[list[float], list[float], float]:
        async with fleet(directory) as client:
            await client.wait_ready()
            await client.publish(write_publication(tmp_path / "publish", 1))

            async def seconds_for(first: int, count: int) -> float:
                prompt = tuple(range(1, 13))
                requests = [
                    group(first + i, prompt_ids=prompt, num_samples=8, ignore_stop=True)
                    for i in range(count)
                ]
                start = time.perf_counter()
                await asyncio.gather(*(client.generate_group(request) for request in requests))
                return time.perf_counter() - start

            single = [await seconds_for(i, 1) for i in range(NUM_BATCHES)]
            processor = time.process_time()
            batch = [await seconds_for(16 * i, 16) for i in range(NUM_BATCHES)]
            return single, batch, (time.process_time() - processor) / NUM_BATCHES

    with engine_process(directory, program="instant_engine.py"):
        single, batch, client_processor = asyncio.run(main())
    print(
        f"16 groups: median {statistics.median(batch) * 1e3:.1f} ms, best {min(batch) * 1e3:.1f} ms, "
        f"client processor time {client_processor * 1e3:.1f} ms; "
        f"1 group: median {statistics.median(single) * 1e3:.1f} ms, best {min(single) * 1e3:.1f} ms"
    )
    assert client_processor < 0.035
    assert min(single) < 0.030
