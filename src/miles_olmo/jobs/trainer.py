"""The trainer job: wires the parts of a run together and runs the loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from functools import partial

import torch

from miles_olmo.grpo.evaluate import Evaluator
from miles_olmo.grpo.follower import Follower
from miles_olmo.grpo.learner import Learner
from miles_olmo.grpo.loop import TrainingRun, train
from miles_olmo.grpo.publisher import Publisher
from miles_olmo.grpo.recording import Recorder
from miles_olmo.grpo.saving import Saver
from miles_olmo.grpo.scoring import Scorer
from miles_olmo.grpo.source import SampleSource
from miles_olmo.grpo.state import RunState
from miles_olmo.grpo.warmup import Example, SupervisedTrainer
from miles_olmo.jobs.entry import JobContext, run_job
from miles_olmo.jobs.fleet import fleet_client
from miles_olmo.jobs.inputs import checked_input
from miles_olmo.jobs.threads import configure_torch, device_of, threads_of
from miles_olmo.jobs.trainer_ranks import join_ranks
from miles_olmo.manifest.models import Manifest
from miles_olmo.plan.model import Resolved
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.optimizer import PolicyOptimizer
from miles_olmo.policy.ranks import Ranks, disconnect_ranks
from miles_olmo.records.expert_load import ExpertLoadLog
from miles_olmo.records.metrics import MetricsLog
from miles_olmo.records.tracking import open_trackers
from miles_olmo.rollout.client import FleetClient
from miles_olmo.tasks.prompts import answer_ids, read_prompts
from miles_olmo.tasks.tokenizer import TextTokenizer
from miles_olmo.tasks.verifiers import find_verifier


def run_trainer(context: JobContext) -> None:
    """Train from the newest complete checkpoint of the run, or from the start.

    The first of several processes leads; the others hold their part of the policy and do what it
    announces.
    """
    manifest = context.plan.manifest
    configure_torch(threads_of(context))
    device = device_of(context)
    ranks = join_ranks(context, manifest.train.parallel, device)
    if ranks.is_leader:
        asyncio.run(_train(context, manifest, ranks, device))
    else:
        # It has nothing to put in order, and a handler could not interrupt a wait for the others.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        build_follower(manifest, ranks, device).follow()
    disconnect_ranks(ranks)


async def _train(
    context: JobContext, manifest: Manifest, ranks: Ranks, device: torch.device
) -> None:
    tokenizer_path = checked_input(context, "data.tokenizer")
    tokenizer = TextTokenizer.from_data(tokenizer_path, manifest.data)
    async with fleet_client(context, tokenizer) as client:
        run = build_run(context, manifest, client, tokenizer, ranks, device)
        await client.wait_ready()
        try:
            await train(run)
        finally:
            run.recorder.trackers.close()


def build_learner(manifest: Manifest, ranks: Ranks, device: torch.device) -> Learner:
    """The policy, or this process's part of it, with random weights."""
    adapter = adapter_for(manifest.model.family)
    module = adapter.build(
        manifest.model, manifest.train, device=device, seed=manifest.seed, ranks=ranks
    )
    optimizer = PolicyOptimizer(module, manifest.train.optimizer, ranks)
    return Learner(module, adapter, optimizer, manifest, ranks=ranks)


def build_supervised(
    learner: Learner, examples: Sequence[Example], ranks: Ranks
) -> SupervisedTrainer | None:
    """The warm-up, if the manifest has one; only the leader needs the examples."""
    manifest = learner.manifest
    if manifest.warmup is None:
        return None
    return SupervisedTrainer(
        learner.module,
        learner.adapter,
        examples,
        manifest.warmup,
        manifest.seed,
        manifest.train.packing.max_tokens,
        ranks,
    )


def build_follower(manifest: Manifest, ranks: Ranks, device: torch.device) -> Follower:
    """Everything that a process needs besides the leader."""
    learner = build_learner(manifest, ranks, device)
    return Follower(learner, partial(build_supervised, learner, (), ranks))


def build_run(
    context: JobContext,
    manifest: Manifest,
    client: FleetClient,
    tokenizer: TextTokenizer,
    ranks: Ranks,
    device: torch.device,
) -> TrainingRun:
    """All parts of the run; weights, optimizer and cursor come from a checkpoint if there is one."""
    learner = build_learner(manifest, ranks, device)
    context.receipts.append("policy-built", built_on(device, context.plan.content.resolved))
    module, adapter, optimizer = learner.module, learner.adapter, learner.optimizer
    read = partial(
        read_prompts,
        tokenizer=tokenizer,
        data=manifest.data,
        max_prompt_tokens=manifest.rollout.max_prompt_tokens,
    )
    prompts = read(checked_input(context, "data.train"))
    context.receipts.append(
        "prompts-read", {"usable": len(prompts), "over_max_prompt_tokens": prompts.num_too_long}
    )
    stop = (tokenizer.eos_id,)
    verifiers = {name: find_verifier(name) for name in manifest.reward.verifiers}
    scorer = Scorer(verifiers, tokenizer.eos_token)
    state = RunState()
    source = SampleSource(
        prompts, client, scorer, manifest.rollout, manifest.seed, manifest.data.shuffle, stop
    )
    saver = Saver(
        module,
        adapter,
        optimizer,
        manifest,
        context.run,
        context.plan.digest,
        context.receipts,
        checked_input(context, "data.tokenizer"),
        ranks,
        context.attempt,
    )
    resumed = saver.restore_newest(state, source)
    if manifest.model.checkpoint is not None and not resumed:
        saver.start_from(context.plan.input_path("model.checkpoint", context.run.root))
    if learner.needs_reference and resumed:
        learner.reference = saver.load_reference()
    evaluator = None
    if manifest.data.evaluation is not None:
        held_out = read(checked_input(context, "data.evaluation"))
        count = manifest.evaluation.num_prompts if manifest.evaluation else len(held_out)
        evaluator = Evaluator(held_out.first(count), client, scorer, manifest.rollout, stop)
    supervised = None
    if manifest.warmup is not None and not resumed:
        examples = [(prompt.ids, answer_ids(prompt, tokenizer)) for prompt in prompts.prompts]
        supervised = build_supervised(learner, examples, ranks)
    return TrainingRun(
        manifest=manifest,
        state=state,
        source=source,
        learner=learner,
        publisher=Publisher(module, adapter, client, context.run, manifest.publish, ranks),
        evaluator=evaluator,
        saver=saver,
        recorder=Recorder(
            context.run,
            context.attempt,
            MetricsLog(context.run.metrics),
            ExpertLoadLog(context.run.expert_load),
            context.receipts,
            {prompt.prompt_id: prompt.text for prompt in prompts.prompts},
            open_trackers(manifest, context.run, context.attempt, context.receipts),
        ),
        supervised=supervised,
    )


def built_on(device: torch.device, resolved: Resolved) -> dict[str, str]:
    """What computes the policy, for a receipt."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "attention": resolved.attention,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    run_job("trainer", run_trainer)
