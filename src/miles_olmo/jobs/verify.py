"""The verify job: loads a checkpoint, publishes it to an engine, samples, replays, compares."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

from miles_olmo.algo.advantages import group_advantages
from miles_olmo.algo.pack_builder import build_packs, route_coverage, training_sequences
from miles_olmo.base.files import write_json
from miles_olmo.grpo.scoring import Scorer
from miles_olmo.grpo.source import SampleSource
from miles_olmo.grpo.verification import Bounds, verify_packs
from miles_olmo.jobs.entry import JobContext, run_job
from miles_olmo.jobs.fleet import fleet_client
from miles_olmo.jobs.inputs import checked_input
from miles_olmo.jobs.threads import configure_torch, device_of, threads_of
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.checkpoint import load_weights, verify_checkpoint
from miles_olmo.policy.publication import write_publication
from miles_olmo.rollout.client import FleetClient
from miles_olmo.tasks.prompts import read_prompts
from miles_olmo.tasks.tokenizer import TextTokenizer
from miles_olmo.tasks.verifiers import find_verifier
from miles_olmo.wire.trajectory import ScoredGroup


def run_verify(context: JobContext) -> None:
    """Measure, write `verification.json`, and fail with E370 if a threshold is not met."""
    configure_torch(threads_of(context))
    asyncio.run(_verify(context))


async def _verify(context: JobContext) -> None:
    manifest, device = context.plan.manifest, device_of(context)
    request = json.loads((context.run.root / "verify.json").read_bytes())
    checkpoint = Path(request["checkpoint"])
    adapter = adapter_for(manifest.model.family)
    module = adapter.build(manifest.model, None, device=device, seed=manifest.seed)
    state = verify_checkpoint(checkpoint)
    load_weights(checkpoint, module, adapter, verified=True)
    tokenizer = TextTokenizer.from_data(checked_input(context, "data.tokenizer"), manifest.data)
    async with fleet_client(context, tokenizer) as client:
        await client.wait_ready()
        publication = write_publication(
            module, adapter, context.run.publication(state.version), state.version
        )
        await client.publish(publication)
        differences = await client.differences(publication)
        groups = await _sample(context, client, tokenizer, int(state.cursor["position"]))
    sequences = training_sequences(
        groups,
        [group_advantages(group.rewards, manifest.algorithm.advantage) for group in groups],
        truncated="score",  # every sampled token is compared
        replay=manifest.train.replay.enabled,
    )
    packing = manifest.train.packing
    packs = build_packs(sequences, packing.max_tokens, share_prefixes=packing.share_prefixes)
    bounds = Bounds.of(manifest)
    measured = verify_packs(
        module,
        adapter,
        [pack.to(device) for pack in packs],
        temperature=manifest.rollout.temperature,
        coverage=route_coverage(sequences).share,
        weight_differences=differences,
        num_tensors=len(publication.tensors),
    )
    failures = measured.failures(bounds)
    report = {
        **{"step": state.step, "version": state.version, "engine": manifest.engines.kind},
        **{"dtype": manifest.model.dtype, "bounds": asdict(bounds)},
        **{"measured": measured.as_json(), "failures": failures},
    }
    write_json(context.run.root / "verification.json", report)
    context.receipts.append("verified", {"passed": not failures, "step": state.step})
    measured.require(bounds)


async def _sample(
    context: JobContext, client: FleetClient, tokenizer: TextTokenizer, position: int
) -> list[ScoredGroup]:
    """The groups that the run would sample next from this checkpoint."""
    manifest = context.plan.manifest
    prompts = read_prompts(
        checked_input(context, "data.train"),
        tokenizer=tokenizer,
        data=manifest.data,
        max_prompt_tokens=manifest.rollout.max_prompt_tokens,
    )
    verifiers = {name: find_verifier(name) for name in manifest.reward.verifiers}
    source = SampleSource(
        prompts,
        client,
        Scorer(verifiers, tokenizer.eos_token),
        manifest.rollout,
        manifest.seed,
        manifest.data.shuffle,
        (tokenizer.eos_id,),
        position=position,
    )
    assert client.version is not None
    return await source.take(manifest.verify.num_prompts, client.version)


if __name__ == "__main__":
    run_job("trainer", run_verify)
