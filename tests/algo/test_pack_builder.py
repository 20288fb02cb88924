"""From scored groups to packs, token for token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.algo.advantages import group_advantages
from miles_olmo.algo.pack_builder import build_packs, route_coverage, training_sequences
from miles_olmo.base.errors import TrainingError
from miles_olmo.manifest.models import Advantage
from miles_olmo.wire.trajectory import ScoredGroup, Segment, Trajectory

LAYERS, TOP_K, EXPERTS = 2, 2, 8


def _trajectory(
    sample_id: str,
    random: np.random.Generator,
    *,
    finish_reason="stop",
    routes: bool = True,
    prompt: int = 3,
    response: int = 4,
) -> Trajectory:
    def rows(count: int, last: bool) -> np.ndarray | None:
        table = random.integers(0, EXPERTS, (count, LAYERS, TOP_K)).astype(np.int16)
        if last:
            table[-1] = -1
        return table if routes else None

    ids = [int(i) for i in random.integers(0, 99, prompt + response)]
    segments = (
        Segment(tuple(ids[:prompt]), "prompt", (False,) * prompt, None, None, rows(prompt, False)),
        Segment(
            tuple(ids[prompt:]),
            "model",
            (True,) * response,
            tuple(float(-x) for x in random.random(response)),
            1,
            rows(response, True),
        ),
    )
    return Trajectory(sample_id, segments, finish_reason, "")


def _group(group_id: int, trajectories: list[Trajectory], rewards: list[float]) -> ScoredGroup:
    return ScoredGroup(group_id, f"train:{group_id}", tuple(trajectories), tuple(rewards))


def _sequences(groups: list[ScoredGroup], truncated="score", replay=True):
    advantages = [group_advantages(group.rewards, Advantage(std="none")) for group in groups]
    return training_sequences(groups, advantages, truncated=truncated, replay=replay)


@st.composite
def group_lists(draw) -> list[ScoredGroup]:
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    groups = []
    for group_id in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 4))
        trajectories = [
            _trajectory(
                f"{group_id}.{index}",
                random,
                finish_reason=draw(st.sampled_from(["stop", "length"])),
                routes=draw(st.booleans()),
                prompt=draw(st.integers(1, 4)),
                response=draw(st.integers(1, 6)),
            )
            for index in range(size)
        ]
        groups.append(_group(group_id, trajectories, [float(x) for x in random.random(size)]))
    return groups


@settings(max_examples=60)
@given(group_lists(), st.integers(10, 60), st.sampled_from(["mask", "score"]), st.randoms())
def test_every_token_is_found_again_in_the_packs(groups, max_tokens, truncated, random):
    sequences = _sequences(groups, truncated)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    random.shuffle(sequences)
    seen = []
    for pack in build_packs(sequences, max_tokens):
        assert pack.num_tokens == sum(pack.document_lengths) <= max_tokens
        start = 0
        for length, index in zip(pack.document_lengths, pack.sequence_indices, strict=True):
            _assert_document(pack, slice(start, start + length), trajectories[index], truncated)
            group = int(trajectories[index].sample_id.split(".")[0])
            member = int(trajectories[index].sample_id.split(".")[1])
            rewards = groups[group].rewards
            expected = rewards[member] - sum(rewards) / len(rewards)
            assert pack.advantages_T[start].item() == pytest.approx(expected, abs=1e-6)
            seen.append(index)
            start += length
    assert sorted(seen) == list(range(len(trajectories)))


def _assert_document(pack, span: slice, trajectory: Trajectory, truncated: str) -> None:
    assert tuple(pack.ids_T[span].tolist()) == trajectory.ids
    mask = [m for segment in trajectory.segments for m in segment.loss_mask]
    if truncated == "mask" and trajectory.finish_reason == "length":
        mask = [False] * len(mask)
    assert pack.mask_T[span].tolist() == mask
    logprobs = [
        x for segment in trajectory.segments for x in segment.logprobs or [0.0] * len(segment.ids)
    ]
    assert torch.equal(pack.behaviour_logprobs_T[span], torch.tensor(logprobs))
    if trajectory.segments[0].routes is not None:
        routes = np.concatenate([segment.routes for segment in trajectory.segments])
        assert pack.routes_TLK is not None
        assert pack.routes_TLK.dtype == torch.int64
        assert torch.equal(pack.routes_TLK[span], torch.from_numpy(routes.astype(np.int64)))
    else:
        assert pack.routes_TLK is None or bool((pack.routes_TLK[span] == -1).all())


def test_coverage_counts_the_rows_that_logprobs_depend_on():
    random = np.random.default_rng(0)
    full, none = _trajectory("0.0", random), _trajectory("0.1", random, routes=False)
    coverage = route_coverage(_sequences([_group(0, [full, none], [0.0, 1.0])]))
    assert (coverage.required, coverage.recorded, coverage.share) == (12, 6, 0.5)
    coverage.require(0.5)
    with pytest.raises(TrainingError, match="E316"):
        coverage.require(0.51)


def test_a_lost_row_lowers_coverage():
    random = np.random.default_rng(0)
    trajectory = _trajectory("0.0", random)
    trajectory.segments[0].routes[1] = -1
    coverage = route_coverage(_sequences([_group(0, [trajectory], [0.0])]))
    assert (coverage.required, coverage.recorded) == (6, 5)


def test_a_row_recorded_for_the_last_token_is_dropped_and_not_counted():
    trajectory = _trajectory("0.0", np.random.default_rng(0))
    trajectory.segments[1].routes[-1] = 3  # an engine that records T rows instead of T - 1
    (sequence,) = _sequences([_group(0, [trajectory], [0.0])])
    assert sequence.routes_TLK is not None
    assert bool((sequence.routes_TLK[-1] == -1).all())
    assert (sequence.num_required_routes, sequence.num_recorded_routes) == (6, 6)


def test_without_replay_routes_stay_behind():
    groups = [_group(0, [_trajectory("0.0", np.random.default_rng(0))], [0.0])]
    (pack,) = build_packs(_sequences(groups, replay=False), 10)
    assert pack.routes_TLK is None


def _broken(**changes) -> Trajectory:
    from dataclasses import replace

    trajectory = _trajectory("7.3", np.random.default_rng(0))
    prompt, model = trajectory.segments
    return replace(trajectory, segments=(prompt, replace(model, **changes)))


def _partly_recorded() -> Trajectory:
    trajectory = _trajectory("7.3", np.random.default_rng(0))
    trajectory.segments[1].routes[0, 1, 0] = -1
    return trajectory


@pytest.mark.parametrize(
    "trajectory",
    [
        _trajectory("7.3", np.random.default_rng(0), finish_reason="abort"),
        _broken(logprobs=(-1.0,)),
        _broken(logprobs=None),
        _broken(loss_mask=(True,)),
        _broken(routes=np.zeros((3, LAYERS, TOP_K), dtype=np.int16)),
        _partly_recorded(),
    ],
    ids=["abort", "logprobs", "no logprobs", "mask", "route rows", "part of a route"],
)
def test_a_trajectory_that_does_not_fit_together_is_refused_by_name(trajectory):
    with pytest.raises(TrainingError, match=r"E317: sample 7\.3"):
        _sequences([_group(7, [trajectory], [0.0])])


def test_a_trained_first_token_is_refused():
    segment = Segment((1, 2), "model", (True, True), (-1.0, -1.0), 0, None)
    with pytest.raises(TrainingError, match="E317"):
        _sequences([_group(0, [Trajectory("0.0", (segment,), "stop", "")], [0.0])])
