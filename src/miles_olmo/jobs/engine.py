"""An engine job of kind `core`: the OLMo-core model behind the HTTP server."""

from __future__ import annotations

import os

import torch

from miles_olmo.jobs.entry import JobContext, run_job
from miles_olmo.jobs.threads import configure_torch, threads_of
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.generation import CoreEngineModel
from miles_olmo.records.receipts import utc_now
from miles_olmo.rollout.core_server import EngineLimits, serve_engine
from miles_olmo.rollout.registry import EngineEntry, register


def run_engine(context: JobContext) -> None:
    """Serve until SIGTERM. The engine starts without weights; it answers once it has been sent some."""
    manifest = context.plan.manifest
    configure_torch(threads_of(context))
    adapter = adapter_for(manifest.model.family)
    module = adapter.build(manifest.model, None, device=torch.device("cpu"), seed=manifest.seed)
    model = CoreEngineModel(module, adapter, max_batch_size=manifest.engines.max_batch_size)

    def announce(url: str) -> None:
        entry = EngineEntry(context.index, url, os.getpid(), context.attempt, utc_now())
        register(context.run.engines, entry)
        context.receipts.append("engine-listening", {"attempt": context.attempt})

    shape = manifest.model.shape
    serve_engine(
        model,
        token=context.read_token(),
        host=context.host,
        port=context.port,
        on_bound=announce,
        limits=EngineLimits(shape.vocab_size, shape.max_position_embeddings),
    )


if __name__ == "__main__":
    run_job("engine", run_engine)
