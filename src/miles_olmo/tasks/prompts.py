"""From a JSONL file to tokenised prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_olmo.base.errors import InputError
from miles_olmo.base.problems import Problem
from miles_olmo.manifest.models import Data
from miles_olmo.tasks.chat import render_prompt
from miles_olmo.tasks.rows import DataErrors, Row, limit_problems, read_rows
from miles_olmo.tasks.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, ready to be sampled."""

    prompt_id: str
    """`"<file stem>:<line number>"`, e.g. "train:17"."""
    ids: tuple[int, ...]
    """Token ids, bos first if the manifest names one."""
    text: str
    """What the ids stand for, without bos."""
    ground_truth: str
    """What the verifier compares the answer with."""
    verifier: str
    """Lower-case name of the verifier."""


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The usable prompts of one file, in file order."""

    prompts: tuple[Prompt, ...]
    num_too_long: int
    """Rows left out because their prompt exceeds max_prompt_tokens."""

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self.prompts[index]

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self.prompts)

    def first(self, count: int) -> PromptSet:
        """The first `count` usable prompts."""
        return PromptSet(self.prompts[:count], self.num_too_long)


def read_prompts(
    path: Path, tokenizer: TextTokenizer, data: Data, *, max_prompt_tokens: int
) -> PromptSet:
    """Read and tokenise a data file; prompts over the limit are left out and counted.

    Args:
        path: JSONL with the columns of `miles_olmo.tasks.rows`.
        tokenizer: Its bos token is put before each prompt, once.
        data: The manifest's [data]; names the chat template.
        max_prompt_tokens: Longest prompt, bos included.

    Raises:
        DataErrors: (an InputError) lines that are not rows, up to 20 of them, with file and line.
        InputError: E124, the file cannot be read; E133, no prompt is left.
    """
    rows, problems = read_rows(path)
    prompts, more = tokenize_rows(rows, tokenizer, data, stem=path.stem, file=str(path))
    problems = sorted(problems + more, key=lambda problem: problem.line)
    if problems:
        raise DataErrors(limit_problems(problems, str(path)))
    kept = tuple(prompt for prompt in prompts if len(prompt.ids) <= max_prompt_tokens)
    if not kept:
        raise InputError(
            "E133",
            f"{path} has no usable prompt among its {len(prompts)} rows",
            why=f"prompts over max_prompt_tokens = {max_prompt_tokens} are left out",
            fix="add rows, or raise rollout.max_prompt_tokens",
        )
    return PromptSet(kept, num_too_long=len(prompts) - len(kept))


def tokenize_rows(
    rows: Sequence[Row], tokenizer: TextTokenizer, data: Data, *, stem: str, file: str
) -> tuple[list[Prompt], list[Problem]]:
    """Prompts of all rows that can be encoded, of any length, and a problem for each that cannot."""
    texts = [render_prompt(row.messages, data.chat_template) for row in rows]
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    for row, text, ids in zip(rows, texts, tokenizer.encode_many(texts), strict=True):
        if isinstance(ids, InputError):
            problems.append(Problem(file, row.line, 1, ids.code, ids.what, ids.why, ids.fix))
            continue
        if tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
            ids = [tokenizer.bos_id, *ids]
        if not ids:
            problems.append(_empty_prompt(file, row.line))
            continue
        prompts.append(
            Prompt(f"{stem}:{row.line}", tuple(ids), text, row.ground_truth, row.verifier)
        )
    return prompts, problems


def answer_ids(prompt: Prompt, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The ground truth as a response, eos last: what the supervised warm-up trains on.

    Raises:
        InputError: E130, the ground truth has a symbol that the vocabulary cannot express.
    """
    return (*tokenizer.encode(prompt.ground_truth), tokenizer.eos_id)


def _empty_prompt(file: str, line: int) -> Problem:
    return Problem(
        file,
        line,
        1,
        "E130",
        "the prompt has no token",
        "an engine needs at least one token to continue from",
        "write a message with content, or set data.bos_token",
    )
