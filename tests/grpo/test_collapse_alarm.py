"""The collapse alarm: on a real policy whose router starves an expert, and over saved state."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_learner import _trajectory, learner, manifest

from miles_olmo.base.errors import TrainingError
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.grpo.collapse_alarm import AlarmState, watch_experts
from miles_olmo.grpo.loop import TrainingRun, training_step
from miles_olmo.grpo.recording import Recorder
from miles_olmo.grpo.saving import Saver
from miles_olmo.grpo.source import SampleSource
from miles_olmo.grpo.state import RunState
from miles_olmo.manifest.models import CollapseAlarm
from miles_olmo.policy.generation import CoreEngineModel
from miles_olmo.records.expert_load import ExpertLoadLog, read_expert_load
from miles_olmo.records.metrics import MetricsLog, read_metrics
from miles_olmo.records.receipts import ReceiptLog, read_chain
from miles_olmo.records.tracking import Trackers
from miles_olmo.wire.generation import SamplingRequest
from miles_olmo.wire.trajectory import ScoredGroup

STARVED = (1, 2)
"""(layer, expert) that no token is ever sent to."""


class PolicySource:
    """Samples from the learner's own weights, as engines with the newest version would."""

    def __init__(self, subject, state: RunState) -> None:
        self.subject, self.run_state, self.position = subject, state, 0

    async def take(self, num_groups: int, version: int) -> list[ScoredGroup]:
        groups = []
        for g in range(self.position, self.position + num_groups):
            engine = CoreEngineModel(self.subject.module, self.subject.adapter, max_batch_size=8)
            prompt = [1 + g % 20, 1 + 7 * g % 23, 1 + 11 * g % 19]
            for i in range(3):
                engine.add(f"{g}.{i}", SamplingRequest(tuple(prompt), 5, 1.0, 10 * g + i, (0,)))
            answers = {}
            while engine.num_unfinished:
                answers.update(engine.step())
            found = [_trajectory(f"{g}.{i}", prompt, answers[f"{g}.{i}"]) for i in range(3)]
            groups.append(ScoredGroup(g, "train:1", tuple(found), (1.0, 0.0, 0.5)))
        self.position += num_groups
        return groups

    def counters(self) -> dict[str, float]:
        return {}

    def state(self):
        return {"position": self.position, "in_flight": []}

    restore = SampleSource.restore


def starved_run(directory: Path, action: str, steps: int = 3) -> TrainingRun:
    """A run whose router cannot choose one expert, continued from its newest checkpoint."""
    alarm = {"share": 0.01, "steps": steps, "action": action}
    content = manifest(
        model__shape__num_experts_per_token=1,
        train__collapse_alarm=alarm,
        train__steps=20,
        checkpoint__every_steps=2,
        rollout__prompts_per_step=6,
        train__optimizer__learning_rate=1e-5,
    )
    subject = learner(content)
    starve(subject.module)
    directory.mkdir(parents=True, exist_ok=True)
    run, state = RunDirectory(directory), RunState()
    receipts = ReceiptLog(run.receipt_log("trainer"), "trainer")
    source = PolicySource(subject, state)
    saver = Saver(
        subject.module, subject.adapter, subject.optimizer, content, run, "d", receipts, Path("-")
    )
    saver.restore_newest(state, source)  # pyright: ignore
    recorder = Recorder(
        run, 1, MetricsLog(run.metrics), ExpertLoadLog(run.expert_load), receipts,
        {"train:1": "?"}, Trackers(receipts, 1),
    )  # fmt: skip

    async def publish(version: int) -> None:
        publisher.version = version

    publisher = SimpleNamespace(version=0, publish=publish)
    return TrainingRun(
        content, state, source, subject, publisher, None, saver, recorder, None  # pyright: ignore
    )  # fmt: skip


def starve(module) -> None:
    """Make one expert's router row the mean of the others: its logit is never the largest."""
    layer, expert = STARVED
    experts = module.blocks[str(layer)].routed_experts_router
    with torch.no_grad():
        rows = experts.weight.view(4, -1)
        rows[expert] = rows[[e for e in range(4) if e != expert]].mean(0)


def alarms(run: TrainingRun) -> list[dict]:
    events = read_chain(run.recorder.receipts.path).events
    return [event["body"] for event in events if event["type"] == "experts-collapsed"]


def test_a_starved_expert_raises_one_warning_that_names_it_and_training_goes_on(tmp_path):
    run = starved_run(tmp_path, "warn")
    for _ in range(5):
        asyncio.run(training_step(run))
    (warning,) = alarms(run)
    assert warning["step"] == 3 and warning["layers"] == {str(STARVED[0]): [STARVED[1]]}
    rows = read_metrics(run.recorder.run.metrics).of("train")
    assert [row.values["router/collapsed_experts"] for row in rows] == [0, 0, 1, 1, 1]
    assert {row.values["router/min_load_share"] for row in rows} == {0.0}
    loads = read_expert_load(run.recorder.run.expert_load, {row.step: 1 for row in rows}).rows
    assert [load.step for load in loads] == [1, 2, 3, 4, 5]
    for load in loads:
        assert load.load_LE[STARVED[0]][STARVED[1]] == 0.0
        assert all(sum(layer) == pytest.approx(4, abs=1e-3) for layer in load.load_LE)


def test_stop_ends_the_run_at_a_checkpoint_and_a_resume_goes_on(tmp_path):
    run = starved_run(tmp_path, "stop")
    with pytest.raises(TrainingError, match=r"E318.*layer 1: 2") as caught:
        for _ in range(5):
            asyncio.run(training_step(run))
    assert run.state.step == 3 and caught.value.exit_code == 6
    assert run.recorder.run.checkpoint_steps() == [2, 3]
    resumed = starved_run(tmp_path, "stop")
    assert resumed.state.step == 3
    asyncio.run(training_step(resumed))
    assert resumed.state.alarm.raised == (STARVED,) and len(alarms(resumed)) == 1


def test_a_run_resumed_from_an_earlier_checkpoint_raises_the_same_alarm(tmp_path):
    whole, first = starved_run(tmp_path / "whole", "warn"), starved_run(tmp_path / "cut", "warn")
    for _ in range(4):
        asyncio.run(training_step(whole))
    asyncio.run(training_step(first))
    asyncio.run(training_step(first))  # the checkpoint of step 2 knows of two low steps
    second = starved_run(tmp_path / "cut", "warn")
    assert second.state.alarm.low_steps_LE[STARVED[0]][STARVED[1]] == 2
    asyncio.run(training_step(second))
    asyncio.run(training_step(second))
    assert alarms(second) == alarms(whole) and second.state.alarm == whole.state.alarm


LOADS = st.lists(
    st.lists(st.sampled_from([0, 1, 40]), min_size=6, max_size=6).filter(
        lambda c: sum(c[:3]) > 0 and sum(c[3:]) > 0
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(LOADS, st.integers(1, 4))
def test_alarms_follow_from_the_loads_alone_and_survive_json(counts, steps):
    alarm = CollapseAlarm(share=0.1, steps=steps)
    state, streaks, standing = AlarmState(), [0] * 6, set()
    for step in counts:
        report = watch_experts(state, torch.tensor(step).float().view(2, 3), alarm)
        assert report is not None
        totals = [sum(step[:3])] * 3 + [sum(step[3:])] * 3
        streaks = [
            streak + 1 if 3 * count / total < 0.1 else 0
            for streak, count, total in zip(streaks, step, totals, strict=True)
        ]
        expected = {(i // 3, i % 3) for i, streak in enumerate(streaks) if streak >= steps}
        assert set(report.newly_raised) == expected - standing
        standing = expected
        state = AlarmState.from_json(json.loads(json.dumps(report.state.as_json())))
        assert state == report.state


def test_a_step_without_trained_routes_measures_nothing():
    assert watch_experts(AlarmState(), None, CollapseAlarm()) is None
    assert watch_experts(AlarmState(), torch.zeros(2, 3), CollapseAlarm()) is None


def test_an_alarm_that_is_off_still_reports_the_load():
    report = watch_experts(AlarmState(), torch.tensor([[0.0, 4.0]]), CollapseAlarm(action="off"))
    assert report is not None and report.metrics() == {"router/min_load_share": 0.0}
