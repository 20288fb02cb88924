"""Checks of sampling, the objective and the optimizer loop."""

from __future__ import annotations

from collections.abc import Iterator

from miles_olmo.base.suggest import did_you_mean
from miles_olmo.manifest.models import Manifest
from miles_olmo.plan.checks.finding import Check, Finding
from miles_olmo.tasks.verifiers import VERIFIERS

_LIMITS = ("rollout.max_prompt_tokens", "rollout.max_response_tokens")


def group_baseline(m: Manifest) -> Iterator[Finding]:
    advantage = m.algorithm.advantage
    uses_group = advantage.baseline == "group_mean" or advantage.std == "unbiased"
    if m.rollout.samples_per_prompt == 1 and uses_group:
        yield Finding(
            "E110",
            (
                "rollout.samples_per_prompt",
                "algorithm.advantage.baseline",
                "algorithm.advantage.std",
            ),
            f"samples_per_prompt = 1 with baseline '{advantage.baseline}' and std '{advantage.std}'",
            "an answer is compared with the others of its group, and there are none",
            "set samples_per_prompt to at least 2",
        )


def sampling(m: Manifest) -> Iterator[Finding]:
    rollout = m.rollout
    for name, value, neutral in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, 0)):
        if value != neutral:
            yield Finding(
                "E111",
                (f"rollout.{name}",),
                f"{name} = {value:g}",
                "logprobs of a truncated distribution would not match the trainer's",
                f"set {name} = {neutral}",
            )
    if rollout.temperature == 0:
        yield Finding(
            "E112",
            ("rollout.temperature",),
            "temperature = 0 in [rollout]",
            "all answers to a prompt would be equal",
            "set a temperature above 0, such as 1.0",
        )


def updates(m: Manifest) -> Iterator[Finding]:
    prompts, count = m.rollout.prompts_per_step, m.train.updates_per_step
    if prompts % count:
        yield Finding(
            "E113",
            ("train.updates_per_step", "rollout.prompts_per_step"),
            f"updates_per_step = {count} does not divide prompts_per_step = {prompts}",
            "the groups of a step are split into equal batches",
            f"set updates_per_step to a divisor of {prompts}",
        )


def lengths(m: Manifest) -> Iterator[Finding]:
    longest = m.rollout.max_prompt_tokens + m.rollout.max_response_tokens
    sum_text = (
        f"max_prompt_tokens + max_response_tokens = {m.rollout.max_prompt_tokens} + "
        f"{m.rollout.max_response_tokens} = {longest}"
    )
    if m.train.packing.max_tokens < longest:
        yield Finding(
            "E114",
            ("train.packing.max_tokens", *_LIMITS),
            f"max_tokens = {m.train.packing.max_tokens} in [train.packing]",
            f"{sum_text}, and a sequence is never split over packs",
            f"set max_tokens to at least {longest}",
        )
    if m.model.shape.max_position_embeddings < longest:
        yield Finding(
            "E115",
            (*_LIMITS, "model.shape.max_position_embeddings"),
            sum_text,
            f"the model has max_position_embeddings = {m.model.shape.max_position_embeddings}",
            "lower the limits of [rollout] or raise max_position_embeddings",
        )


def evaluation_data(m: Manifest) -> Iterator[Finding]:
    for name, section in (("warmup", m.warmup), ("evaluation", m.evaluation)):
        if section is not None and m.data.evaluation is None:
            yield Finding(
                "E116",
                (name, "data.evaluation"),
                f"[{name}] without data.evaluation",
                "accuracy is measured on held-out prompts",
                f"set data.evaluation or remove [{name}]",
            )


def warmup_band(m: Manifest) -> Iterator[Finding]:
    if m.warmup is not None and m.warmup.min_accuracy > m.warmup.max_accuracy:
        yield Finding(
            "E117",
            ("warmup.min_accuracy", "warmup.max_accuracy"),
            f"min_accuracy = {m.warmup.min_accuracy:g} is above "
            f"max_accuracy = {m.warmup.max_accuracy:g}",
            "no measurement lies in the band",
            "set min_accuracy to at most max_accuracy",
        )


def idle_keys(m: Manifest) -> Iterator[Finding]:
    """Keys that were written although what they configure is off."""
    algorithm, schedule, alarm = m.algorithm, m.train.schedule, m.train.collapse_alarm
    idle = [
        (
            algorithm.kl.coefficient == 0 and "estimator" in algorithm.kl.model_fields_set,
            "algorithm.kl.estimator",
            "algorithm.kl.coefficient",
            "a coefficient of 0 switches the penalty off",
            "set algorithm.kl.coefficient above 0 or remove estimator",
        ),
        (
            not algorithm.importance_sampling.enabled
            and "cap" in algorithm.importance_sampling.model_fields_set,
            "algorithm.importance_sampling.cap",
            "algorithm.importance_sampling.enabled",
            "importance sampling is not enabled",
            "set enabled = true or remove cap",
        ),
        (
            schedule.kind == "constant" and "final_fraction" in schedule.model_fields_set,
            "train.schedule.final_fraction",
            "train.schedule.kind",
            "a constant schedule has no final value of its own",
            "set kind to 'linear' or 'cosine', or remove final_fraction",
        ),
        *(
            (
                not m.logging.wandb.enabled and name in m.logging.wandb.model_fields_set,
                f"logging.wandb.{name}",
                "logging.wandb.enabled",
                "Weights & Biases is not enabled",
                f"set enabled = true or remove {name}",
            )
            for name in ("project", "mode")
        ),
        *(
            (
                alarm.action == "off" and name in alarm.model_fields_set,
                f"train.collapse_alarm.{name}",
                "train.collapse_alarm.action",
                "the alarm is off",
                f"set action to 'warn' or 'stop', or remove {name}",
            )
            for name in ("share", "steps")
        ),
    ]
    for is_idle, key, switch, why, fix in idle:
        if is_idle:
            yield Finding("E118", (key, switch), f"{key} has no effect", why, fix)
    if algorithm.constant_length is not None and algorithm.aggregation != "constant":
        yield Finding(
            "E119",
            ("algorithm.constant_length", "algorithm.aggregation"),
            f"constant_length with aggregation = '{algorithm.aggregation}'",
            "it is the divisor of aggregation 'constant' only",
            "set aggregation = 'constant' or remove constant_length",
        )


def auxiliary_losses(m: Manifest) -> Iterator[Finding]:
    for name in ("load_balancing_loss", "z_loss"):
        loss = getattr(m.train, name)
        if (loss.mode == "off") == (loss.coefficient == 0):
            continue
        is_off = loss.mode == "off"
        yield Finding(
            "E120",
            (f"train.{name}.coefficient", f"train.{name}.mode"),
            f"[train.{name}] has mode = '{loss.mode}' and coefficient = {loss.coefficient:g}",
            "a loss that is off has no weight" if is_off else "a loss without weight does nothing",
            "set mode to 'per_pack' or 'global', or coefficient to 0"
            if is_off
            else "set coefficient above 0, or mode to 'off'",
        )


def cadences(m: Manifest) -> Iterator[Finding]:
    publish = m.publish.every_steps
    for name, section in (("checkpoint", m.checkpoint), ("evaluation", m.evaluation)):
        if section is not None and section.every_steps % publish:
            yield Finding(
                "E121",
                (f"{name}.every_steps", "publish.every_steps"),
                f"{name}.every_steps = {section.every_steps} is not a multiple of "
                f"publish.every_steps = {publish}",
                "engines must serve the trainer's current weights at that step",
                f"set {name}.every_steps to a multiple of {publish}",
            )


def ramp(m: Manifest) -> Iterator[Finding]:
    num_updates = m.train.steps * m.train.updates_per_step
    if m.train.schedule.ramp_steps > num_updates:
        yield Finding(
            "E122",
            ("train.schedule.ramp_steps", "train.steps", "train.updates_per_step"),
            f"ramp_steps = {m.train.schedule.ramp_steps}",
            f"training has {num_updates} optimizer steps, so the peak is never reached",
            f"set ramp_steps to at most {num_updates}",
        )


def verifiers(m: Manifest) -> Iterator[Finding]:
    for index, name in enumerate(m.reward.verifiers):
        if name.lower() not in VERIFIERS:
            yield Finding(
                "E131",
                ("reward.verifiers",),
                f"unknown verifier '{name}' at verifiers[{index}]",
                "nothing could score its rows",
                did_you_mean(name.lower(), VERIFIERS),
            )


OBJECTIVE_CHECKS: tuple[Check, ...] = (
    group_baseline,
    sampling,
    updates,
    lengths,
    evaluation_data,
    warmup_band,
    idle_keys,
    auxiliary_losses,
    cadences,
    ramp,
    verifiers,
)
