"""Verifiers: from an answer and its ground truth to a verdict.

A verdict is one of three things, and they never stand in for each other: the answer was scored; the answer
(or its ground truth) cannot be graded; or the grader itself failed, which says nothing about the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from miles_olmo.base.errors import InputError
from miles_olmo.base.suggest import did_you_mean
from miles_olmo.wire.trajectory import FinishReason


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verifier sees."""

    text: str
    """Decoded response, special tokens included."""
    ground_truth: str
    finish_reason: FinishReason
    eos_token: str
    """Token that ends a response; not part of the answer."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The answer was graded."""

    value: float
    """Finite reward, 0 to 1."""
    detail: str = ""
    """Why, for people who read samples."""


@dataclass(frozen=True, slots=True)
class Ungradable:
    """The row cannot be graded, whatever the answer (a malformed ground truth)."""

    reason: str


@dataclass(frozen=True, slots=True)
class InfrastructureError:
    """The grader failed: retry it; never a reward."""

    reason: str


Verdict = Scored | Ungradable | InfrastructureError
Verifier = Callable[[Answer], Verdict]


def exact_match(answer: Answer) -> Verdict:
    """1 when the response, without its eos token, equals the ground truth and was finished by it."""
    if answer.finish_reason != "stop":
        return Scored(0.0, f"not finished: {answer.finish_reason}")
    text = answer.text.removesuffix(answer.eos_token)
    if text == answer.ground_truth:
        return Scored(1.0, "equal")
    return Scored(0.0, f"expected {answer.ground_truth!r}")


VERIFIERS: Mapping[str, Verifier] = MappingProxyType({"exact_match": exact_match})
"""Every verifier by the name that `reward.verifiers` and the data's `dataset` column use."""


def find_verifier(name: str) -> Verifier:
    """A verifier by name, without regard to case.

    Raises:
        InputError: E131, there is no such verifier.
    """
    verifier = VERIFIERS.get(name.lower())
    if verifier is None:
        raise InputError(
            "E131",
            f"unknown verifier '{name}'",
            why="nothing could score its rows",
            fix=did_you_mean(name.lower(), VERIFIERS),
        )
    return verifier
