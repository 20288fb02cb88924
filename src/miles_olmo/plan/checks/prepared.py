"""Checks of data that the run will make itself: nothing has to be written to know that it fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from miles_olmo.manifest.models import Manifest, PrepareData
from miles_olmo.plan.checks.finding import Finding
from miles_olmo.plan.checks.inputs import (
    Inspection,
    missing_tokens,
    too_few_for_evaluation,
    vocabulary_size,
)
from miles_olmo.plan.model import PlanInput
from miles_olmo.tasks import reversed_digits
from miles_olmo.tasks.prepare import RECORD_NAME, prepared_files
from miles_olmo.tasks.verifiers import VERIFIERS


def inspect_prepared(m: Manifest, spec: PrepareData) -> Inspection:
    """The files that [data.prepare] will make."""
    files = prepared_files(m.data)
    result = Inspection()
    result.inputs = [
        PlanInput(key=key, kind="produced", path=name, sha256=None, num_bytes=None)
        for key, name in files.items()
    ]
    result.findings += file_names(files)
    result.findings += rows(m, spec)
    result.findings += lengths(m, spec)
    result.vocabulary = known = reversed_digits.vocabulary()
    result.findings += missing_tokens(m, set(known))
    result.findings += vocabulary_size(m, len(known))
    result.findings += verifier(m)
    return result


def file_names(files: dict[str, str]) -> Iterator[Finding]:
    seen: dict[str, str] = {RECORD_NAME: "the record of the preparation"}
    for key, name in files.items():
        if name != PurePosixPath(name).name or "\\" in name or "\0" in name or name in ("", ".."):
            yield Finding(
                "E136",
                (key, "data.prepare"),
                f"{key} = '{name}' is not a plain file name",
                "prepared files lie in the run's own data directory",
                "use a name without a directory",
            )
        elif name in seen:
            yield Finding(
                "E136",
                (key, "data.prepare"),
                f"{key} = '{name}' is also the name of {seen[name]}",
                "one would overwrite the other",
                "use different names",
            )
        seen.setdefault(name, key)


def rows(m: Manifest, spec: PrepareData) -> Iterator[Finding]:
    available, asked = 10**spec.digits, spec.num_train + spec.num_evaluation
    if asked > available:
        yield Finding(
            "E135",
            ("data.prepare.num_train", "data.prepare.num_evaluation", "data.prepare.digits"),
            f"num_train + num_evaluation = {asked} in [data.prepare]",
            f"there are {available} numbers of {spec.digits} digits, and none is used twice",
            "lower num_train or raise digits",
        )
    asked_prompts = m.evaluation.num_prompts if m.evaluation and m.data.evaluation else 0
    if asked_prompts > spec.num_evaluation:
        yield too_few_for_evaluation(asked_prompts, spec.num_evaluation)


def lengths(m: Manifest, spec: PrepareData) -> Iterator[Finding]:
    """All questions are equally long, and each token is one character."""
    prompt, truth = reversed_digits.question(0, spec.digits)
    needs = [
        ("max_prompt_tokens", len(prompt) + (m.data.bos_token is not None), "questions"),
        ("max_response_tokens", len(truth) + 1, "answers"),
    ]
    for name, needed, what in needs:
        limit = getattr(m.rollout, name)
        if needed > limit:
            yield Finding(
                "E135",
                (f"rollout.{name}", "data.prepare.digits"),
                f"{name} = {limit}",
                f"{what} of {spec.digits} digits have {needed} tokens",
                f"set {name} to at least {needed}",
            )


def verifier(m: Manifest) -> Iterator[Finding]:
    allowed = {name.lower() for name in m.reward.verifiers}
    if reversed_digits.VERIFIER not in allowed and allowed <= set(VERIFIERS):
        yield Finding(
            "E132",
            ("reward.verifiers", "data.prepare.task"),
            f"reward.verifiers does not list '{reversed_digits.VERIFIER}'",
            "every prepared row names it",
            f"add '{reversed_digits.VERIFIER}'",
        )
