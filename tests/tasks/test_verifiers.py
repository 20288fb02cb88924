"""Verdicts on answers."""

import pytest

from miles_olmo.base.errors import InputError
from miles_olmo.tasks.verifiers import VERIFIERS, Answer, Scored, find_verifier


@pytest.mark.parametrize(
    ("text", "finish_reason", "value"),
    [
        ("4321<eos>", "stop", 1.0),
        ("4321", "stop", 1.0),
        ("4321", "length", 0.0),
        ("4321<eos>", "abort", 0.0),
        ("432<eos>", "stop", 0.0),
        ("4321 <eos>", "stop", 0.0),
        ("4321<eos><eos>", "stop", 0.0),
        ("", "stop", 0.0),
    ],
)
def test_exact_match_needs_the_ground_truth_and_a_finished_answer(text, finish_reason, value):
    verdict = find_verifier("exact_match")(Answer(text, "4321", finish_reason, "<eos>"))
    assert isinstance(verdict, Scored)
    assert verdict.value == value


def test_names_are_found_without_regard_to_case():
    assert find_verifier("Exact_Match") is VERIFIERS["exact_match"]


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(InputError, match="did you mean 'exact_match'") as caught:
        find_verifier("exactmatch")
    assert caught.value.code == "E131"
