"""A run plan as a page to read before taking a machine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from miles_olmo.cli.terminal import bold, columns, count, size
from miles_olmo.plan.model import PlanInput, RunPlan


def summarize(plan: RunPlan, path: Path, *, color: bool) -> str:
    """What runs where, batch arithmetic, inputs, what is written, and the next command."""
    sections = {
        "What is trained": _model(plan),
        "What runs": _jobs(plan),
        "Each step": _step(plan),
        "Objective": _objective(plan),
        "Inputs": _inputs(plan),
        "What is written": _outputs(plan),
    }
    manifest = plan.manifest
    lines = [f"{bold(manifest.name, color=color)}  plan {plan.digest[:12]}"]
    for title, rows in sections.items():
        lines += ["", bold(title, color=color), *columns(list(rows))]
    lines += [
        "",
        f"Plan    {path}",
        f"Digest  {plan.digest}",
        f"Next    miles launch {shlex.quote(str(path))}",
    ]
    return "\n".join(lines)


def _model(plan: RunPlan) -> Iterator[tuple[str, str]]:
    model, resolved = plan.manifest.model, plan.content.resolved
    shape = model.shape
    yield "model", f"{model.family}, {count(resolved.num_parameters, 'parameter')}, {model.dtype}"
    yield "per token", f"{count(resolved.num_active_parameters, 'parameter')} active"
    shared = "one shared expert" if shape.shared_expert_hidden_size else "no shared expert"
    yield (
        "experts",
        f"{shape.num_experts} per layer, top-{shape.num_experts_per_token}, {shared}, "
        f"{count(shape.num_layers, 'layer')}"
        + (f", {len(shape.dense_layers_indices)} of them dense" * bool(shape.dense_layers_indices)),
    )
    yield "start from", model.checkpoint or f"random weights, seed {plan.manifest.seed}"
    warmup = plan.manifest.warmup
    if warmup is not None:
        yield (
            "warm-up",
            f"supervised, until greedy accuracy is in {warmup.min_accuracy:g}-"
            f"{warmup.max_accuracy:g}, at most {count(warmup.max_steps, 'step')}",
        )


def _jobs(plan: RunPlan) -> Iterator[tuple[str, ...]]:
    for job in plan.content.jobs:
        restart = ""
        if job.restartable:
            restart = f"restarted up to {count(plan.manifest.engines.max_restarts, 'time')}"
        yield (
            job.name,
            count(job.processes, "process", "processes"),
            f"{job.device}, {count(job.threads, 'thread')}",
            f"python -m {job.module}",
            restart,
        )


def _step(plan: RunPlan) -> Iterator[tuple[str, str]]:
    m, resolved = plan.manifest, plan.content.resolved
    rollout, steps = m.rollout, m.train.steps
    yield (
        "samples",
        f"{count(rollout.prompts_per_step, 'prompt')} x {rollout.samples_per_prompt} = "
        f"{count(resolved.samples_per_step, 'sample')}",
    )
    yield (
        "updates",
        f"{m.train.updates_per_step} of {count(resolved.samples_per_update, 'sample')} each",
    )
    yield (
        "tokens",
        f"at most {rollout.max_prompt_tokens:,} + {rollout.max_response_tokens:,} = "
        f"{resolved.max_sequence_tokens:,} per sample, {resolved.max_tokens_per_step:,} per step",
    )
    packs = f"of at most {count(m.train.packing.max_tokens, 'token')}"
    yield "packs", f"{packs}, {resolved.attention} attention"
    yield (
        "in total",
        f"{count(steps, 'step')}, {count(steps * resolved.samples_per_step, 'sample')}, at most "
        f"{count(steps * resolved.max_tokens_per_step, 'token')}",
    )


def _objective(plan: RunPlan) -> Iterator[tuple[str, str]]:
    m, algorithm = plan.manifest, plan.manifest.algorithm
    dual = f", dual {algorithm.clip.dual:g}" if algorithm.clip.dual is not None else ""
    yield (
        algorithm.name,
        f"clip -{algorithm.clip.low:g} / +{algorithm.clip.high:g}{dual}, "
        f"{algorithm.aggregation} aggregation over the global batch",
    )
    kl = algorithm.kl
    yield "KL", f"{kl.coefficient:g} x {kl.estimator}" if kl.coefficient else "off"
    tis = algorithm.importance_sampling
    yield "TIS", f"capped at {tis.cap:g}" if tis.enabled else "off"
    replay = m.train.replay
    coverage = f"on, at least {replay.min_coverage:.0%} of the routes recorded"
    yield "router replay", coverage if replay.enabled else "off"
    for name, loss in (("load balancing", m.train.load_balancing_loss), ("z-loss", m.train.z_loss)):
        shown = "off" if loss.mode == "off" else f"{loss.coefficient:g}, {loss.mode}"
        yield name, shown
    yield "rewards", ", ".join(m.reward.verifiers)
    exact = "bit-identical in trainer and engine" if plan.content.resolved.bit_exact else "compared"
    yield "logprobs", exact


def _inputs(plan: RunPlan) -> Iterator[tuple[str, ...]]:
    prepare = plan.manifest.data.prepare
    for entry in plan.content.inputs:
        if entry.kind == "produced":
            task = prepare.task if prepare is not None else ""
            yield entry.key, entry.path, "", f"made by the run: {task}"
        else:
            yield entry.key, entry.path, size(entry.num_bytes or 0), f"sha256 {entry.sha256}"
            if entry.num_rows is not None:
                yield "", "", "", _rows(entry)


def _rows(entry: PlanInput) -> str:
    rows = count(entry.num_rows or 0, "row")
    if entry.num_too_long:
        return f"{rows}, {entry.num_too_long:,} left out: prompt over max_prompt_tokens"
    return rows


def _outputs(plan: RunPlan) -> Iterator[tuple[str, str]]:
    m = plan.manifest
    run = f"{m.launch.runs_directory}/{plan.run_stem}-N/"
    yield "run", run
    each = plan.content.resolved.checkpoint_bytes
    yield (
        "checkpoints/",
        f"every {count(m.checkpoint.every_steps, 'step')} and at the end, {size(each)} each, "
        f"newest {m.checkpoint.keep} kept ({size(each * m.checkpoint.keep)})",
    )
    yield "export/", "Hugging Face format, logits checked" if m.checkpoint.export else "none"
    if m.evaluation is not None:
        yield (
            "evaluation",
            f"greedy, {count(m.evaluation.num_prompts, 'prompt')}, every "
            f"{count(m.evaluation.every_steps, 'step')}",
        )
    yield "always", "plan.json, receipts/, metrics.jsonl, samples/, logs/"
