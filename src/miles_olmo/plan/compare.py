"""How two plans differ, and whether a run of one may continue under the other.

What decides the shape of the state, the order of the data or what is sampled must not change: the resumed
run would not be the run that was stopped. Everything else may, when the user says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from miles_olmo.base.errors import PlanError
from miles_olmo.plan.model import RunPlan

Decides = Literal["state", "order", "sampling", "nothing"]

DECIDES: Mapping[str, Decides] = MappingProxyType(
    {
        "version": "state",
        "name": "nothing",
        "seed": "order",
        "model": "state",
        "data": "order",
        "data.evaluation": "nothing",
        "warmup": "state",
        "rollout": "sampling",
        "rollout.prompts_per_step": "order",
        "rollout.samples_per_prompt": "order",
        "rollout.max_prompt_tokens": "order",
        "rollout.max_refills": "order",
        "rollout.truncated": "nothing",
        "engines": "nothing",
        "engines.kind": "sampling",
        "engines.tensor_parallel": "sampling",
        "reward": "nothing",
        "algorithm": "nothing",
        "algorithm.name": "state",
        "algorithm.kl.coefficient": "state",
        "train": "nothing",
        "train.updates_per_step": "state",
        "train.parallel": "state",
        "train.parallel.timeout_seconds": "nothing",
        "publish": "nothing",
        "publish.every_steps": "sampling",
        "checkpoint": "nothing",
        "evaluation": "nothing",
        "verify": "nothing",
        "logging": "nothing",
        "launch": "nothing",
    }
)
"""What a manifest key decides; the longest prefix of a key counts."""

INPUT_DECIDES: Mapping[str, Decides] = MappingProxyType(
    {
        "data.train": "order",
        "data.evaluation": "nothing",
        "data.tokenizer": "order",
        "model.checkpoint": "state",
    }
)
"""What the bytes of an input decide."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two plans do not agree on."""

    key: str
    """Dotted manifest key, `input <key>` for the bytes of an input, or `code`."""
    old: Any
    """JSON value in the run's plan; None when absent."""
    new: Any
    """JSON value in the new plan; None when absent."""
    decides: Decides
    """Any but "nothing" refuses a resume."""

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def decides(key: str) -> Decides:
    """What a manifest key decides.

    Raises:
        KeyError: no prefix of the key is in the table.
    """
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        if prefix in DECIDES:
            return DECIDES[prefix]
    raise KeyError(key)


def state_differences(old: RunPlan, new: RunPlan) -> tuple[Difference, ...]:
    """Every difference between two plans: manifest keys in order, then inputs, then code."""
    return (*_manifest_differences(old, new), *_input_differences(old, new), *_code(old, new))


def check_resume(old: RunPlan, new: RunPlan, *, accept_changes: bool) -> tuple[Difference, ...]:
    """Whether a run of `old` may continue under `new`; returns what will change.

    Raises:
        PlanError: E144, a difference decides state, order or sampling; E145, there are others and
            `accept_changes` is False.
    """
    differences = state_differences(old, new)
    refused = [item for item in differences if item.decides != "nothing"]
    listed = [{"key": d.key, "old": d.old, "new": d.new} for d in refused or differences]
    if refused:
        raise PlanError(
            "E144",
            "cannot resume with " + ", ".join(map(str, refused)),
            why="this decides " + " and ".join(sorted({item.decides for item in refused})),
            fix="restore the old values or start a new run",
            differences=listed,
        )
    if differences and not accept_changes:
        raise PlanError(
            "E145",
            "the plan differs from the run's: " + ", ".join(map(str, differences)),
            why="a resumed run would go on with other settings",
            fix="add --accept-changes, or restore the old values",
            differences=listed,
        )
    return differences


def _manifest_differences(old: RunPlan, new: RunPlan) -> Iterator[Difference]:
    before, after = _flat(old), _flat(new)
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield Difference(key, before.get(key), after.get(key), decides(key))


def _flat(plan: RunPlan) -> dict[str, Any]:
    """Manifest values by dotted key; an absent section has no keys."""
    flat: dict[str, Any] = {}

    def visit(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                visit(inner, f"{key}.{name}" if key else name)
        elif value is not None:
            flat[key] = value

    visit(plan.manifest.model_dump(mode="json"), "")
    return flat


def _input_differences(old: RunPlan, new: RunPlan) -> Iterator[Difference]:
    before = {entry.key: entry.sha256 for entry in old.content.inputs}
    after = {entry.key: entry.sha256 for entry in new.content.inputs}
    for key in sorted(before.keys() & after.keys()):
        if before[key] != after[key]:
            yield Difference(f"input {key}", before[key], after[key], INPUT_DECIDES[key])


def _code(old: RunPlan, new: RunPlan) -> Iterator[Difference]:
    if old.content.code != new.content.code:
        made, running = old.content.code.model_dump(), new.content.code.model_dump()
        yield Difference("code", made, running, "nothing")
