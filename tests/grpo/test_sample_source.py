"""The source's promises: the same group is the same prompt and seed; failures never become rewards."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.base.errors import EngineError, TrainingError
from miles_olmo.grpo.scoring import Scorer
from miles_olmo.grpo.source import GROUP_ATTEMPTS, SampleSource
from miles_olmo.manifest.models import Rollout
from miles_olmo.rollout.client import GroupRequest
from miles_olmo.tasks.prompts import Prompt, PromptSet
from miles_olmo.tasks.verifiers import Answer, InfrastructureError, Scored, Ungradable
from miles_olmo.wire.trajectory import Segment, Trajectory

ROLLOUT = Rollout(
    prompts_per_step=4, samples_per_prompt=2, max_prompt_tokens=8, max_response_tokens=4
)


class RecordingFleet:
    """Answers like a fleet whose engines all serve one version, and remembers what was asked."""

    def __init__(self, version: int = 0, fail_on: int | None = None) -> None:
        self.version, self.fail_on = version, fail_on
        self.requests: list[GroupRequest] = []
        self.counters: dict[str, int] = {}

    async def generate_group(self, request: GroupRequest) -> tuple[Trajectory, ...]:
        await asyncio.sleep(0)
        self.requests.append(request)
        if request.group_id == self.fail_on:
            raise EngineError("E224", "no engine is left")
        routes = np.zeros((1, 1, 1), np.int16)
        return tuple(
            Trajectory(
                f"{request.group_id}.{index}",
                (
                    Segment(request.prompt_ids, "prompt", (False,), None, None, routes),
                    Segment((7,), "model", (True,), (-0.5,), self.version, routes),
                ),
                "stop",
                str((request.seed + index) % 3),
            )
            for index in range(request.num_samples)
        )


def prompts(count: int) -> PromptSet:
    return PromptSet(
        tuple(Prompt(f"train:{i}", (i,), str(i), "1", "check") for i in range(1, count + 1)), 0
    )


def source(fleet: RecordingFleet, verifier=None, count: int = 10) -> SampleSource:
    def is_one(answer: Answer) -> Scored:
        return Scored(float(answer.text == "1"))

    scorer = Scorer({"check": verifier or is_one}, "<eos>")
    return SampleSource(prompts(count), fleet, scorer, ROLLOUT, 3, True, (2,))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 25))
def test_groups_do_not_depend_on_how_they_were_taken_nor_on_an_interruption(sizes, cut):
    whole, parts = RecordingFleet(), RecordingFleet()
    total = sum(sizes)
    expected = asyncio.run(source(whole).take(total, 0))
    first, taken = source(parts), []
    for size in sizes:
        if first.position >= cut:  # a restarted trainer: a new source from the saved cursor
            second = source(parts)
            second.restore(first.state())
            first = second
        taken += asyncio.run(first.take(size, 0))
    assert taken == expected
    assert {r.group_id: (r.prompt_ids, r.seed) for r in parts.requests} == {
        r.group_id: (r.prompt_ids, r.seed) for r in whole.requests
    }


def test_every_group_of_an_epoch_asks_another_prompt():
    fleet = RecordingFleet()
    asyncio.run(source(fleet).take(10, 0))
    assert len({request.prompt_ids for request in fleet.requests}) == 10


def test_the_cursor_stays_where_it_was_when_an_engine_fails():
    fleet = RecordingFleet(fail_on=2)
    taking = source(fleet)
    with pytest.raises(EngineError, match="E224"):
        asyncio.run(taking.take(4, 0))
    state = taking.state()
    assert (state["position"], state["in_flight"]) == (0, [])


def test_a_failing_verifier_is_never_a_reward_and_the_group_is_dropped_and_counted():
    fleet = RecordingFleet()
    taking = source(fleet, lambda answer: InfrastructureError("grader is down"))
    assert asyncio.run(taking.take(2, 0)) == []
    counters = taking.counters()
    assert counters["rollout/dynamic_filter/drop_verifier_failed"] == 2
    assert counters["rollout/verifier_errors"] == 2 * GROUP_ATTEMPTS
    assert taking.position == 2


def test_a_group_whose_verifier_recovers_is_sampled_again_with_another_seed():
    verdicts = iter([InfrastructureError("timeout")])
    taking = source(RecordingFleet(), lambda answer: next(verdicts, Scored(1.0)))
    (group,) = asyncio.run(taking.take(1, 0))
    assert group.rewards == (1.0, 1.0)
    first, second = taking.fleet.requests
    assert first.seed != second.seed
    assert first.prompt_ids == second.prompt_ids


def test_a_resume_goes_on_with_the_counts_of_its_checkpoint():
    first = source(RecordingFleet(), lambda answer: Ungradable("no ground truth"))
    first.fleet.counters["groups"] = 5
    asyncio.run(first.take(2, 0))
    saved = json.loads(json.dumps(first.state()))
    second = source(RecordingFleet(), lambda answer: Ungradable("no ground truth"))
    second.restore(saved)
    assert second.counters()["rollout/ungradable"] == 4
    second.fleet.counters["groups"] = 3  # of this process
    asyncio.run(second.take(1, 0))
    counters = second.counters()
    assert (counters["rollout/ungradable"], counters["rollout/engine/groups"]) == (6, 8)
    third = source(RecordingFleet())
    third.restore({"position": 7, "in_flight": []})  # of a version that did not save them
    assert third.counters()["rollout/ungradable"] == 0


def test_an_ungradable_answer_scores_zero_and_is_counted():
    taking = source(RecordingFleet(), lambda answer: Ungradable("no ground truth"))
    (group,) = asyncio.run(taking.take(1, 0))
    assert group.rewards == (0.0, 0.0)
    assert taking.counters()["rollout/ungradable"] == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_a_failure_of_the_verifier(value):
    taking = source(RecordingFleet(), lambda answer: Scored(value))
    assert asyncio.run(taking.take(1, 0)) == []


def test_tokens_of_another_version_are_refused():
    with pytest.raises(TrainingError, match="E351"):
        asyncio.run(source(RecordingFleet(version=4)).take(1, 5))
