"""The client of a run's engines, as its plan describes them."""

from __future__ import annotations

from miles_olmo.jobs.entry import JobContext
from miles_olmo.rollout.client import FleetClient, PolicyShape
from miles_olmo.tasks.tokenizer import TextTokenizer


def fleet_client(context: JobContext, tokenizer: TextTokenizer) -> FleetClient:
    """A client that checks answers against the plan's model; use it in one event loop."""
    manifest = context.plan.manifest
    shape = manifest.model.shape
    return FleetClient(
        context.run.engines,
        context.read_token(),
        manifest.engines,
        shape=PolicyShape(
            shape.vocab_size,
            shape.num_layers,
            shape.num_experts_per_token,
            shape.num_experts,
            routes=manifest.train.replay.enabled,
            routed_layers=shape.routed_layers,
        ),
        decode=tokenizer.decode,
    )
