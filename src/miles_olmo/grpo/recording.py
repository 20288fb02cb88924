"""What a run leaves behind for people: metrics per step, samples to read, receipts of events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from miles_olmo.base.rundir import RunDirectory
from miles_olmo.grpo.evaluate import EvaluationResult
from miles_olmo.grpo.state import RunState
from miles_olmo.records.metrics import MetricsLog
from miles_olmo.records.receipts import ReceiptLog
from miles_olmo.records.samples import Sample, write_samples
from miles_olmo.wire.trajectory import ScoredGroup

if TYPE_CHECKING:
    from miles_olmo.grpo.loop import TrainingRun


@dataclass
class Recorder:
    """Writes the trainer's records."""

    run: RunDirectory
    attempt: int
    metrics: MetricsLog
    receipts: ReceiptLog
    prompt_texts: Mapping[str, str]
    """Prompt text by prompt id, for the samples."""

    def step(
        self,
        training: TrainingRun,
        groups: list[ScoredGroup],
        refills: int,
        learned: dict[str, float],
    ) -> None:
        """One training step: `learned` is empty when the step was skipped for lack of signal."""
        values = {
            **learned,
            **rollout_metrics(groups),
            **_timings(training.seconds, groups),
            **training.source.counters(),
            "rollout/refills": refills,
            "rollout/skipped_step": float(not learned),
            "rollout/weight_version": training.state.version,
        }
        self.metrics.append("train", training.state.step, self.attempt, values)
        write_samples(
            self.run.samples(training.state.step), self._samples(training.state.step, groups)
        )

    def warmup(self, step: int, values: dict[str, float]) -> None:
        self.metrics.append("warmup", step, self.attempt, values)

    def evaluation(self, state: RunState, result: EvaluationResult) -> None:
        self.metrics.append("evaluation", state.step, self.attempt, result.metrics())

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
        "rollout/truncated_ratio": fmean(t.finish_reason == "length" for t in trajectories),
        "rollout/zero_std": fmean(len(set(group.rewards)) == 1 for group in groups),
        "rollout/num_groups": len(groups),
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
