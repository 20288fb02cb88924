"""Greedy accuracy on held-out prompts, through the same engines that sample for training."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from miles_olmo.grpo.scoring import Scorer
from miles_olmo.manifest.models import Rollout
from miles_olmo.rollout.client import FleetClient, GroupRequest
from miles_olmo.tasks.prompts import PromptSet


@dataclass(frozen=True)
class EvaluationResult:
    """Means over the prompts that could be scored."""

    accuracy: float
    """Share of answers with reward 1 or more."""
    reward: float
    response_tokens: float
    truncated: float
    """Share of answers that used up their budget."""
    num_prompts: int
    num_unscored: int
    """Prompts left out because their verifier failed."""

    def metrics(self) -> dict[str, float]:
        return {
            "eval/accuracy": self.accuracy,
            "eval/reward": self.reward,
            "eval/response_len": self.response_tokens,
            "eval/truncated_ratio": self.truncated,
            "eval/num_prompts": self.num_prompts,
            "eval/num_unscored": self.num_unscored,
        }


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the policy version that was published last."""

    prompts: PromptSet
    """Evaluation prompts, already cut to the number asked for."""
    fleet: FleetClient
    scorer: Scorer
    rollout: Rollout
    stop_token_ids: tuple[int, ...]

    async def __call__(self) -> EvaluationResult:
        """One greedy answer per prompt.

        Raises:
            EngineError: as `FleetClient.generate_group`.
        """
        answers = await asyncio.gather(
            *(
                self.fleet.generate_group(
                    GroupRequest(
                        group_id=index,
                        prompt_ids=prompt.ids,
                        num_samples=1,
                        max_tokens=self.rollout.max_response_tokens,
                        temperature=0.0,
                        seed=0,
                        stop_token_ids=self.stop_token_ids,
                    )
                )
                for index, prompt in enumerate(self.prompts)
            )
        )
        scored = [
            (trajectory, rewards[0])
            for prompt, (trajectory,) in zip(self.prompts, answers, strict=True)
            if (rewards := self.scorer.score_group(prompt, (trajectory,))) is not None
        ]
        count = max(len(scored), 1)
        return EvaluationResult(
            accuracy=sum(reward >= 1.0 for _, reward in scored) / count,
            reward=sum(reward for _, reward in scored) / count,
            response_tokens=sum(t.num_response_tokens for t, _ in scored) / count,
            truncated=sum(t.finish_reason == "length" for t, _ in scored) / count,
            num_prompts=len(scored),
            num_unscored=len(answers) - len(scored),
        )
