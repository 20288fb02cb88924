"""Checks of the files that a run reads, and their hashes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from miles_olmo.base.errors import InputError
from miles_olmo.base.problems import Problem
from miles_olmo.base.suggest import closest, did_you_mean
from miles_olmo.manifest.models import Manifest
from miles_olmo.plan.checks.finding import Finding
from miles_olmo.plan.hashing import local_input
from miles_olmo.plan.model import PlanInput
from miles_olmo.tasks.chat import CHATML_TOKENS
from miles_olmo.tasks.prompts import Prompt, tokenize_rows
from miles_olmo.tasks.rows import Row, limit_problems, read_rows
from miles_olmo.tasks.tokenizer import TextTokenizer, read_tokenizer
from miles_olmo.tasks.verifiers import VERIFIERS

_VOCABULARY = ("model.shape.vocab_size", "data.tokenizer")


@dataclass
class Inspection:
    """What the input files are, and what is wrong with them."""

    inputs: list[PlanInput] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """Faults of manifest keys."""
    problems: list[Problem] = field(default_factory=list)
    """Faults at places in data files."""
    vocabulary: Mapping[str, int] | None = None
    """Token to id of data.tokenizer; None when it cannot be read."""


def inspect_local(m: Manifest, base: Path, shown_base: str) -> Inspection:
    """Hash and check the user's own files.

    Args:
        m: The manifest.
        base: Directory that paths are relative to.
        shown_base: The same, as the user wrote it; data files are named with it in reports.
    """
    result = Inspection()
    present = _hash_present(m, base, result)
    tokenizer = None
    if "data.tokenizer" in present:
        tokenizer = _check_tokenizer(m, base / m.data.tokenizer, result)
    for key, written in (("data.train", m.data.train), ("data.evaluation", m.data.evaluation)):
        if written is not None and key in present:
            shown = os.path.join(shown_base, written)  # noqa: PTH118 - keeps "./" as written
            _check_rows(m, key, base / written, shown, tokenizer, result)
    return result


def _hash_present(m: Manifest, base: Path, result: Inspection) -> set[str]:
    present: set[str] = set()
    files = {
        "data.train": m.data.train,
        "data.evaluation": m.data.evaluation,
        "data.tokenizer": m.data.tokenizer,
    }
    for key, written in files.items():
        if written is None:
            continue
        path = base / written
        if not path.is_file():
            why = "it is a directory" if path.is_dir() else f"there is no file {path}"
            fix = similar_name(path) or "correct the path, or let [data.prepare] make the files"
            what = f"{key} = '{written}' cannot be read"
            result.findings.append(Finding("E124", (key,), what, why, fix))
            continue
        try:
            result.inputs.append(local_input(key, written, base))
        except OSError as error:
            what, why = f"{key} = '{written}' cannot be read", error.strerror or str(error)
            result.findings.append(Finding("E124", (key,), what, why, "make it readable"))
            continue
        present.add(key)
    return present


def similar_name(path: Path) -> str | None:
    """A suggestion for a path that is not there."""
    if path.exists() or not path.parent.is_dir():
        return None
    near = closest(path.name, (entry.name for entry in path.parent.iterdir()))
    return f"did you mean '{near}'?" if near is not None else None


def _check_tokenizer(m: Manifest, path: Path, result: Inspection) -> TextTokenizer | None:
    try:
        raw = read_tokenizer(path)
    except InputError as error:
        found = Finding(error.code, ("data.tokenizer",), error.what, error.why, error.fix)
        result.findings.append(found)
        return None
    result.vocabulary = vocabulary = raw.get_vocab(with_added_tokens=True)
    missing = list(missing_tokens(m, set(vocabulary)))
    result.findings += missing
    result.findings += vocabulary_size(m, max(vocabulary.values(), default=-1) + 1)
    if missing:
        return None  # prompts would be split into other tokens than they were meant to be
    return TextTokenizer(
        raw, eos_token=m.data.eos_token, bos_token=m.data.bos_token, source=m.data.tokenizer
    )


def missing_tokens(m: Manifest, known: set[str]) -> Iterator[Finding]:
    """Special tokens of [data], and of its chat template, that a vocabulary lacks."""
    named = [("data.bos_token", m.data.bos_token), ("data.eos_token", m.data.eos_token)]
    if m.data.chat_template == "chatml":
        named += [("data.chat_template", token) for token in CHATML_TOKENS]
    for key, token in named:
        if token is not None and token not in known:
            near = closest(token, known)
            yield Finding(
                "E127",
                (key, "data.tokenizer"),
                f"{key} needs the token '{token}', which {m.data.tokenizer} does not have",
                "it would be split into several ordinary tokens",
                f"did you mean '{near}'?" if near else "name a token of the tokenizer",
            )


def vocabulary_size(m: Manifest, needed: int) -> Iterator[Finding]:
    """The embedding must have a row for every token id."""
    if needed > m.model.shape.vocab_size:
        yield Finding(
            "E126",
            _VOCABULARY,
            f"vocab_size = {m.model.shape.vocab_size}, but {m.data.tokenizer} has token ids "
            f"up to {needed - 1}",
            "the embedding would lack rows",
            f"set vocab_size to at least {needed}",
        )


def _check_rows(
    m: Manifest,
    key: str,
    path: Path,
    shown: str,
    tokenizer: TextTokenizer | None,
    result: Inspection,
) -> None:
    rows, problems = read_rows(path, shown_as=shown)
    problems += _wrong_verifiers(m, rows, shown)
    prompts: list[Prompt] = []
    if tokenizer is not None:
        prompts, more = tokenize_rows(rows, tokenizer, m.data, stem=path.stem, file=shown)
        problems += more
        if m.warmup is not None and key == "data.train":
            problems += _unanswerable(prompts, tokenizer, shown)
    problems.sort(key=lambda problem: problem.line)
    result.problems += limit_problems(problems, shown)
    limit = m.rollout.max_prompt_tokens
    num_too_long = sum(len(prompt.ids) > limit for prompt in prompts)
    if not problems and tokenizer is not None:
        result.findings += _enough_prompts(m, key, len(rows), num_too_long)
    result.inputs = [
        entry.model_copy(update={"num_rows": len(rows), "num_too_long": num_too_long})
        if entry.key == key
        else entry
        for entry in result.inputs
    ]


def _enough_prompts(m: Manifest, key: str, num_rows: int, num_too_long: int) -> Iterator[Finding]:
    usable = num_rows - num_too_long
    if usable == 0:
        yield Finding(
            "E133",
            (key, "rollout.max_prompt_tokens"),
            f"{key} has no usable prompt among its {num_rows} rows",
            f"prompts over max_prompt_tokens = {m.rollout.max_prompt_tokens} are left out",
            "raise rollout.max_prompt_tokens or add rows",
        )
    elif key == "data.evaluation" and m.evaluation and m.evaluation.num_prompts > usable:
        yield too_few_for_evaluation(m.evaluation.num_prompts, usable)


def too_few_for_evaluation(asked: int, usable: int) -> Finding:
    return Finding(
        "E134",
        ("evaluation.num_prompts", "data.evaluation"),
        f"num_prompts = {asked} in [evaluation]",
        f"data.evaluation has {usable} usable rows",
        f"set num_prompts to at most {usable}",
    )


def _wrong_verifiers(m: Manifest, rows: list[Row], shown: str) -> Iterator[Problem]:
    allowed = {name.lower() for name in m.reward.verifiers}
    may_be_misspelt = not allowed <= set(VERIFIERS)  # reported once, at reward.verifiers
    for row in rows:
        if row.verifier in allowed:
            continue
        if row.verifier not in VERIFIERS:
            what, why = f"unknown verifier '{row.verifier}'", "nothing could score the row"
            fix = did_you_mean(row.verifier, VERIFIERS)
            yield Problem(shown, row.line, 1, "E131", what, why, fix)
        elif not may_be_misspelt:
            what = f"verifier '{row.verifier}' is not in reward.verifiers"
            why, fix = "[reward] says what the data may name", "add it to reward.verifiers"
            yield Problem(shown, row.line, 1, "E132", what, why, fix)


def _unanswerable(prompts: list[Prompt], tokenizer: TextTokenizer, shown: str) -> Iterator[Problem]:
    """Ground truths that the supervised warm-up could not train on."""
    answers = tokenizer.encode_many([prompt.ground_truth for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        if isinstance(answer, InputError):
            line = int(prompt.prompt_id.rsplit(":", 1)[1])
            yield Problem(shown, line, 1, answer.code, answer.what, answer.why, answer.fix)
