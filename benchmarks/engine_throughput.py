"""Engine tokens per second: over HTTP against the model alone, and batched against one at a time.

    python benchmarks/engine_throughput.py [--groups 8] [--samples 8] [--repeats 10]

One `core` engine of the quickstart's shape on one CPU thread, in a process of its own as in a run, asked
through the fleet client. The model alone gets the same requests in that process's place. All
settings run alternately; prints one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import describe_machine

from miles_olmo.manifest.models import Engines, Manifest
from miles_olmo.manifest.reading import read_manifest
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.generation import CoreEngineModel
from miles_olmo.policy.publication import write_publication
from miles_olmo.records.receipts import utc_now
from miles_olmo.rollout.client import FleetClient, GroupRequest, PolicyShape
from miles_olmo.rollout.core_server import EngineLimits, serve_engine
from miles_olmo.rollout.registry import EngineEntry, register
from miles_olmo.wire.generation import SamplingRequest

QUICKSTART = Path(__file__).parents[1] / "manifests" / "quickstart.toml"
TOKEN = "benchmark"


def build(manifest: Manifest, batch: int):
    torch.set_num_threads(1)
    adapter = adapter_for(manifest.model.family)
    module = adapter.build(manifest.model, None, device=torch.device("cpu"), seed=0)
    return adapter, module, CoreEngineModel(module, adapter, max_batch_size=batch)


def serve(directory: str, batch: int) -> None:
    """The engine's process."""
    manifest, _ = read_manifest(QUICKSTART)
    _, _, model = build(manifest, batch)
    shape = manifest.model.shape

    def announce(url: str) -> None:
        register(Path(directory), EngineEntry(0, url, os.getpid(), 1, utc_now()))

    limits = EngineLimits(shape.vocab_size, shape.max_position_embeddings)
    serve_engine(model, token=TOKEN, on_bound=announce, limits=limits)


def requests(groups: int, samples: int, repeat: int) -> list[GroupRequest]:
    generator = torch.Generator().manual_seed(repeat)
    prompts = torch.randint(3, 48, (groups, 10), generator=generator).tolist()
    return [
        GroupRequest(g, tuple(prompt), samples, 6, 1.0, 1000 * g, (), ignore_stop=True)
        for g, prompt in enumerate(prompts)
    ]


def offline(model: CoreEngineModel, asked: list[GroupRequest]) -> None:
    """The same sequences without HTTP."""
    for request in asked:
        for index in range(request.num_samples):
            sampling = SamplingRequest(
                request.prompt_ids, request.max_tokens, 1.0, request.seed + index, (), True
            )
            model.add(f"{request.group_id}.{index}", sampling)
    while model.num_unfinished:
        model.step()


async def measure(directory: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per repeat of each setting."""
    manifest, _ = read_manifest(QUICKSTART)
    batch = arguments.groups * arguments.samples
    adapter, module, model = build(manifest, batch)
    _, _, single = build(manifest, 1)
    shape = manifest.model.shape
    wanted = PolicyShape(
        shape.vocab_size, shape.num_layers, shape.num_experts_per_token, shape.num_experts
    )
    seconds: dict[str, list[float]] = {"http": [], "offline": [], "offline_batch_1": []}
    settings = Engines(count=1)
    async with FleetClient(directory, TOKEN, settings, shape=wanted, decode=str) as client:
        await client.wait_ready()
        await client.publish(write_publication(module, adapter, directory / "v000000", 0))
        for repeat in range(-2, arguments.repeats):
            asked = requests(arguments.groups, arguments.samples, repeat + 2)
            started = time.perf_counter()
            await asyncio.gather(*(client.generate_group(request) for request in asked))
            times = {"http": time.perf_counter() - started}
            times["offline"] = timed(lambda: offline(model, asked))  # noqa: B023
            times["offline_batch_1"] = timed(lambda: offline(single, asked))  # noqa: B023
            if repeat >= 0:  # the first two warm caches up
                for name, value in times.items():
                    seconds[name].append(value)
    return seconds


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    batch = arguments.groups * arguments.samples
    with tempfile.TemporaryDirectory() as directory:
        context = multiprocessing.get_context("spawn")
        engine = context.Process(target=serve, args=(directory, batch))
        engine.start()
        try:
            seconds = asyncio.run(measure(Path(directory), arguments))
        finally:
            engine.terminate()
            engine.join()
    tokens = batch * 6
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    report = {
        "benchmark": "engine_throughput",
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "sequences": batch,
        "response_tokens_per_second": {name: round(rate) for name, rate in rates.items()},
        "ratio_http_to_offline": round(rates["http"] / rates["offline"], 3),
        "ratio_batched_to_single": round(rates["offline"] / rates["offline_batch_1"], 2),
    }
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
