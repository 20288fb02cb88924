"""The other side of `trl_side_by_side.py`: TRL's GRPOTrainer on one CPU, from a job file.

    python benchmarks/trl_grpo.py job.json

Run by `trl_side_by_side.py`, in a Python that has TRL. Writes one JSON document: the mean reward of
every step, seconds from the start of the first step to the end of each, processor time per step, and
versions. Nothing is saved, logged or evaluated on the way, and gradient checkpointing is off: every choice that TRL
leaves to its user is the fast one.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer


class Progress(TrainerCallback):
    """Rewards and times of the steps; ends the training when the goal is reached."""

    def __init__(self, goal: float, window: int) -> None:
        self.goal, self.window = goal, window
        self.rewards: list[float] = []
        self.seconds: list[float] = []
        self.started = self.cpu_started = self.cpu_seconds = 0.0

    def reward(self, completion_ids: list[list[int]], answer_ids: list[list[int]], **_: Any):
        """1 for the exact answer, stop token included: our `exact_match`, token by token."""
        scores = [float(got == want) for got, want in zip(completion_ids, answer_ids, strict=True)]
        self.rewards.append(sum(scores) / len(scores))
        return scores

    def on_step_begin(self, args, state, control, **_: Any) -> None:
        if not self.seconds:
            self.started, self.cpu_started = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        self.cpu_seconds = time.process_time() - self.cpu_started
        newest = self.rewards[-self.window :]
        if len(newest) == self.window and sum(newest) / self.window >= self.goal:
            control.should_training_stop = True


def train(job: dict[str, Any], progress: Progress) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(job["model"])
    rows = job["rows"]
    encoded = tokenizer([row["prompt"] for row in rows])["input_ids"]
    assert encoded == [row["prompt_ids"] for row in rows], "both sides must see the same tokens"
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    per_step = job["prompts_per_step"] * job["samples_per_prompt"]
    config = GRPOConfig(
        output_dir=job["output"],
        use_cpu=True,
        bf16=False,
        seed=job["seed"],
        per_device_train_batch_size=per_step,
        num_generations=job["samples_per_prompt"],
        max_steps=job["max_steps"],
        max_completion_length=job["max_response_tokens"],
        temperature=job["temperature"],
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["ramp_steps"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        adam_epsilon=job["eps"],
        weight_decay=0.0,
        max_grad_norm=job["max_grad_norm"],
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        beta=0.0,
        loss_type="dapo",  # mean over the tokens of the whole batch: our aggregation "token"
        scale_rewards="group",
        router_aux_loss_coef=job["load_balancing"],
        shuffle_dataset=False,  # the rows are in the order that we visit them
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    GRPOTrainer(
        model=model,
        reward_funcs=progress.reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[progress],
    ).train()


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    progress = Progress(job["goal"], job["window"])
    train(job, progress)
    packages = ("trl", "transformers", "torch")
    report = {
        "rewards": progress.rewards,
        "seconds": progress.seconds,
        "cpu_step_seconds": progress.cpu_seconds / len(progress.seconds),
        "versions": {name: version(name) for name in packages},
    }
    Path(job["report"]).write_text(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
