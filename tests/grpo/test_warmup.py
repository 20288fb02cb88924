"""The warm-up ends inside its band: it steps back from an overshoot and gives up with a reason."""

from __future__ import annotations

import asyncio

import pytest
import torch
from test_learner import manifest

from miles_olmo.base.errors import TrainingError
from miles_olmo.grpo.warmup import MAX_STEPS_BACK, SupervisedTrainer, WarmupResult, warm_up
from miles_olmo.manifest.models import Warmup
from miles_olmo.policy.adapter import adapter_for

EXAMPLES = [((1, 3 + i % 5), (4 + i % 7, 2)) for i in range(12)]


def trainer(**settings) -> SupervisedTrainer:
    torch.set_num_threads(1)
    model = manifest().model
    adapter = adapter_for("olmo3moe")
    module = adapter.build(model, manifest().train, device=torch.device("cpu"), seed=0)
    warmup = Warmup(**{"batch_size": 8, "evaluate_every": 4, "max_steps": 60, **settings})
    return SupervisedTrainer(module, adapter, EXAMPLES, warmup, 0, 64)


def run(subject: SupervisedTrainer, accuracies) -> tuple[WarmupResult, list[int]]:
    """Warm up with given measurements; also the steps at which was measured."""
    measured = iter(accuracies)
    steps: list[int] = []

    async def measure() -> float:
        return next(measured)

    def report(step: int, values: dict[str, float]) -> None:
        if "eval/accuracy" in values:
            steps.append(step)

    return asyncio.run(warm_up(subject, measure=measure, report=report)), steps


def test_it_stops_at_the_first_measurement_inside_the_band():
    result, steps = run(trainer(), [0.0, 0.1, 0.3])
    assert result == WarmupResult(0.3, 8, 0)
    assert steps == [0, 4, 8]


def test_no_step_is_taken_when_the_policy_is_already_inside():
    result, _ = run(trainer(), [0.35])
    assert result.steps == 0


def test_an_overshoot_goes_back_and_continues_slower_with_closer_measurements():
    subject = trainer()
    start = {name: p.detach().clone() for name, p in subject.module.named_parameters()}
    restored = []
    original = subject.restore

    def watched(snapshot) -> None:
        original(snapshot)
        parameters = dict(subject.module.named_parameters())
        restored.append(all(torch.equal(start[name], parameters[name]) for name in start))

    subject.restore = watched  # type: ignore[method-assign]
    result, steps = run(subject, [0.0, 0.9, 0.3])
    assert restored == [True]
    assert result == WarmupResult(0.3, 6, 1)
    assert steps == [0, 4, 6]
    assert subject.learning_rate == subject.settings.learning_rate / 2
    assert subject.optimizer.num_updates == 2


@pytest.mark.parametrize("accuracy", [0.0, 0.9])
def test_it_gives_up_with_a_named_error(accuracy):
    measurements = [0.0] + [accuracy] * 100
    with pytest.raises(TrainingError, match="E350"):
        run(trainer(), measurements)
    assert MAX_STEPS_BACK < 100


def test_it_learns_the_examples():
    subject = trainer(learning_rate=3e-3)
    losses = [subject.step(index)["train/loss"] for index in range(60)]
    assert losses[-1] < 0.5 * losses[0]
