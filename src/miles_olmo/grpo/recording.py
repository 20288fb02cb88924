"""What a run leaves behind for people: metrics per step, samples to read, receipts of events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.grpo.batch import groups_with_signal
from miles_olmo.grpo.collapse_alarm import ExpertReport
from miles_olmo.grpo.evaluate import EvaluationResult
from miles_olmo.grpo.state import RunState
from miles_olmo.records.expert_load import ExpertLoadLog
from miles_olmo.records.metrics import MetricsLog, Phase
from miles_olmo.records.receipts import ReceiptLog
from miles_olmo.records.samples import Sample, write_samples
from miles_olmo.records.tracking import Trackers
from miles_olmo.wire.trajectory import ScoredGroup

if TYPE_CHECKING:
    from miles_olmo.grpo.loop import TrainingRun


@dataclass
class Recorder:
    """Writes the trainer's records."""

    run: RunDirectory
    attempt: int
    metrics: MetricsLog
    expert_load: ExpertLoadLog
    receipts: ReceiptLog
    prompt_texts: Mapping[str, str]
    """Prompt text by prompt id, for the samples."""
    trackers: Trackers
    """Copies of the metrics for other viewers."""

    def step(
        self,
        training: TrainingRun,
        groups: list[ScoredGroup],
        refills: int,
        learned: dict[str, float],
        experts: ExpertReport | None,
    ) -> None:
        """One training step: `learned` is empty when the step was skipped for lack of signal."""
        state, trained = training.state, groups_with_signal(groups, training.manifest)
        values = {
            **learned,
            **rollout_metrics(groups),
            **staleness([group for group, _ in trained], state.version - 1),
            **(experts.metrics() if experts else {}),
            **_timings(training.seconds, groups),
            **training.source.counters(),
            "rollout/refills": refills,
            "rollout/skipped_step": float(not learned),
            "rollout/weight_version": state.version,
            **self.trackers.counters(),
        }
        if experts is not None:  # before the metrics: a load without metrics is of no step
            self.expert_load.append(state.step, self.attempt, experts.load_LE)
        self._measured("train", state.step, values)
        write_samples(self.run.samples(state.step), self._samples(state.step, groups))

    def warmup(self, step: int, values: dict[str, float]) -> None:
        self._measured("warmup", step, values)

    def evaluation(self, state: RunState, result: EvaluationResult) -> None:
        self._measured("evaluation", state.step, result.metrics())

    def _measured(self, phase: Phase, step: int, values: dict[str, float]) -> None:
        self.metrics.append(phase, step, self.attempt, values)
        self.trackers.write(phase, step, values)

    def receipt(self, kind: str, body: dict[str, Any]) -> None:
        self.receipts.append(kind, {"attempt": self.attempt, **body})

    def _samples(self, step: int, groups: list[ScoredGroup]) -> list[Sample]:
        return [
            Sample(
                sample_id=trajectory.sample_id,
                prompt_id=group.prompt_id,
                step=step,
                prompt=self.prompt_texts[group.prompt_id],
                completion=trajectory.text,
                reward=reward,
                finish_reason=trajectory.finish_reason,
                version=trajectory.oldest_version or 0,
                num_tokens=trajectory.num_response_tokens,
            )
            for group in groups
            for trajectory, reward in zip(group.trajectories, group.rewards, strict=True)
        ]


def rollout_metrics(groups: list[ScoredGroup]) -> dict[str, float]:
    """Means over all samples taken for a step, those without signal included."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return {"rollout/num_groups": 0}
    return {
        "rollout/reward": fmean(reward for group in groups for reward in group.rewards),
        "rollout/response_len": fmean(t.num_response_tokens for t in trajectories),
        "rollout/response_len_max": max(t.num_response_tokens for t in trajectories),
        "rollout/response_tokens": sum(t.num_response_tokens for t in trajectories),
        "rollout/truncated_ratio": fmean(t.finish_reason == "length" for t in trajectories),
        "rollout/zero_std": fmean(len(set(group.rewards)) == 1 for group in groups),
        "rollout/num_groups": len(groups),
    }


def staleness(trained: list[ScoredGroup], version: int) -> dict[str, float]:
    """Policy versions between the one that sampled a token and the one it trains.

    Args:
        trained: The groups of the step's batch; none when the step was skipped.
        version: Of the weights that the step started from.
    """
    lags = [
        (version - segment.version, sum(segment.loss_mask))
        for group in trained
        for trajectory in group.trajectories
        for segment in trajectory.segments
        if segment.version is not None
    ]
    tokens = sum(count for _, count in lags)
    if not tokens:
        return {}
    return {
        "train/staleness": sum(lag * count for lag, count in lags) / tokens,
        "train/staleness_max": max(lag for lag, count in lags if count),
    }


def _timings(seconds: dict[str, float], groups: list[ScoredGroup]) -> dict[str, float]:
    response = sum(t.num_response_tokens for group in groups for t in group.trajectories)
    total = sum(seconds.values())
    return {
        **{f"perf/{phase}_time": value for phase, value in seconds.items()},
        "perf/step_time": total,
        "perf/tokens_per_sec": response / total if total else 0.0,
        "perf/rollout_tokens_per_sec": response / seconds["rollout"] if seconds["rollout"] else 0.0,
    }
