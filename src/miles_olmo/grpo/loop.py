"""The training run as a story: warm up, then sample, learn, publish, until the last step.

Synchronous GRPO (Shao et al. 2024, arXiv:2402.03300) with router replay (R3): the engines hold the
policy version that the next step trains, so every token of a step has one version and staleness 0.
Left out here: asynchronous sampling, several nodes, critics.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from miles_olmo.base.errors import TrainingError
from miles_olmo.grpo.batch import groups_with_signal
from miles_olmo.grpo.collapse_alarm import ExpertReport, watch_experts
from miles_olmo.grpo.evaluate import Evaluator
from miles_olmo.grpo.learner import Learner
from miles_olmo.grpo.publisher import Publisher
from miles_olmo.grpo.recording import Recorder
from miles_olmo.grpo.saving import Saver
from miles_olmo.grpo.source import SampleSource
from miles_olmo.grpo.state import RunState
from miles_olmo.grpo.warmup import SupervisedTrainer, warm_up
from miles_olmo.grpo.work import Work
from miles_olmo.manifest.models import Manifest
from miles_olmo.wire.trajectory import ScoredGroup


@dataclass
class TrainingRun:
    """The parts of a run, wired together by `miles_olmo.jobs.trainer`."""

    manifest: Manifest
    state: RunState
    """Step, policy version and optimizer updates: what a checkpoint continues."""
    source: SampleSource
    learner: Learner
    publisher: Publisher
    evaluator: Evaluator | None
    saver: Saver
    recorder: Recorder
    supervised: SupervisedTrainer | None
    """Present when the manifest has a warm-up and the run starts anew."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time spent per phase of the current step."""


async def train(run: TrainingRun) -> None:
    """Run to the last step, then export. Whatever ends it early leaves the newest checkpoint usable."""
    await run.publisher.publish(run.state.version)
    if run.state.step == 0:
        await begin(run)
    while run.state.step < run.manifest.train.steps:
        await training_step(run)
    run.saver.export(run.state)
    run.learner.ranks.announce(Work.STOP)


async def begin(run: TrainingRun) -> None:
    """Everything before the first training step."""
    if run.supervised is not None:
        assert run.evaluator is not None, "the plan requires evaluation data for a warm-up"
        await warm_up_policy(run, run.supervised, run.evaluator)
    if run.learner.needs_reference:
        run.saver.save_reference(run.state, run.source)
        run.learner.reference = run.saver.load_reference()
    await evaluate(run)
    run.saver.save(run.state, run.source)


async def training_step(run: TrainingRun) -> None:
    """Sample groups, learn from them, publish; evaluate and save when it is time."""
    run.seconds.clear()
    with timed(run, "rollout"):
        groups, refills = await take_with_signal(run)
    with timed(run, "train"):
        learned = run.learner.update(groups)
    run.state.step += 1
    run.state.version += bool(learned)
    with timed(run, "publish"):
        if learned and is_due(run, run.manifest.publish.every_steps):
            await run.publisher.publish(run.state.version)
    experts = watch(run)
    run.recorder.step(run, groups, refills, learned, experts)
    if run.manifest.evaluation and is_due(run, run.manifest.evaluation.every_steps):
        await evaluate(run)
    stop = stop_error(run, experts)
    if stop is not None or is_due(run, run.manifest.checkpoint.every_steps):
        run.saver.save(run.state, run.source)
    if stop is not None:
        raise stop


def watch(run: TrainingRun) -> ExpertReport | None:
    """What the experts did in the step; None when it was skipped."""
    settings = run.manifest.train.collapse_alarm
    experts = watch_experts(run.state.alarm, run.learner.expert_counts_LE, settings)
    if experts is not None:
        run.state.alarm = experts.state
        if experts.newly_raised:
            run.recorder.receipt(
                "experts-collapsed", {"step": run.state.step, **experts.warning(settings)}
            )
    return experts


def stop_error(run: TrainingRun, experts: ExpertReport | None) -> TrainingError | None:
    """The error that a collapse alarm of this step ends the run with, if it does."""
    settings = run.manifest.train.collapse_alarm
    if settings.action != "stop" or experts is None or not experts.newly_raised:
        return None
    return experts.stop_error(settings, run.state.step)


async def take_with_signal(run: TrainingRun) -> tuple[list[ScoredGroup], int]:
    """A step's groups; sampled anew, up to a bound, while none of them carries signal.

    Returns:
        All groups taken, and how many refills it needed. Without signal after the last refill the
        step is skipped by its caller.
    """
    rollout = run.manifest.rollout
    groups: list[ScoredGroup] = []
    for refill in range(rollout.max_refills + 1):
        groups += await run.source.take(rollout.prompts_per_step, run.publisher.version)
        if groups_with_signal(groups, run.manifest):
            return groups, refill
    return groups, rollout.max_refills


async def warm_up_policy(
    run: TrainingRun, supervised: SupervisedTrainer, evaluator: Evaluator
) -> None:
    """Supervised training until greedy accuracy, measured through the engines, is in its band."""

    async def measure() -> float:
        run.state.version += 1
        await run.publisher.publish(run.state.version)
        return (await evaluator()).accuracy

    result = await warm_up(supervised, measure=measure, report=run.recorder.warmup)
    run.learner.take_weights()
    run.recorder.receipt(
        "warmup-finished",
        {"accuracy": result.accuracy, "steps": result.steps, "steps_back": result.steps_back},
    )


async def evaluate(run: TrainingRun) -> None:
    """Measure and record greedy accuracy of the published policy."""
    if run.manifest.evaluation and run.evaluator:
        run.recorder.evaluation(run.state, await run.evaluator())


def is_due(run: TrainingRun, every_steps: int) -> bool:
    """Whether the step just finished is a multiple of `every_steps`, or the last one."""
    return run.state.step % every_steps == 0 or run.state.step == run.manifest.train.steps


@contextmanager
def timed(run: TrainingRun, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        run.seconds[phase] = run.seconds.get(phase, 0.0) + time.perf_counter() - started
