"""Sampled answers of a step, to be read by people: `samples/step-000012.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from miles_olmo.base.errors import UsageError
from miles_olmo.base.files import write_atomic

CHECKED_BYTES = 64 * 2**20
"""Newest samples that are looked through for damage."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, as text, with its reward."""

    sample_id: str
    """`"<group id>.<index in group>"`."""
    prompt_id: str
    """`"<file stem>:<line number>"`."""
    step: int
    prompt: str
    completion: str
    reward: float
    finish_reason: str
    """stop, length or abort."""
    version: int
    """Oldest policy version that sampled a token of it."""
    num_tokens: int
    """Response tokens."""


def write_samples(path: Path, samples: Iterable[Sample]) -> None:
    """Write all samples of one step, atomically; an earlier attempt's file is replaced.

    Not synced to the disk: samples are for reading, and every step would wait for it.
    """
    names = [field.name for field in fields(Sample)]
    rows = ({name: getattr(sample, name) for name in names} for sample in samples)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_atomic(path, "".join(lines).encode("utf-8", "surrogatepass"), durable=False)


def read_samples(path: Path) -> list[Sample]:
    """Samples of one step, in the order they were written.

    Raises:
        UsageError: E533, the file is not what `write_samples` writes; file and line are named.
    """
    samples = []
    for number, line in _lines(path):
        try:
            samples.append(_sample(line))
        except _NOT_A_SAMPLE as error:
            raise UsageError(
                "E533",
                f"{path}:{number} is not a sample",
                why=f"reading it failed with {type(error).__name__}: {error}",
                fix="delete the file; samples are for reading and nothing depends on them",
            ) from error
    return samples


def sample_problems(directory: Path) -> list[str]:
    """Lines below `<run>/samples` that are no samples, with file and line, newest step first.

    Files are read up to `CHECKED_BYTES`: a long run has far more than anybody waits for.
    """
    problems, left = [], CHECKED_BYTES
    for step in reversed(sample_steps(directory)):
        path = directory / f"step-{step:06d}.jsonl"
        try:
            left -= path.stat().st_size
            if left < 0:
                break
            for number, line in _lines(path):
                try:
                    _sample(line)
                except _NOT_A_SAMPLE:
                    problems.append(f"{path}:{number}: not a sample")
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
    return problems


_NOT_A_SAMPLE = (ValueError, KeyError, TypeError, RecursionError)
_NAMES = [field.name for field in fields(Sample)]


def _lines(path: Path) -> list[tuple[int, bytes]]:
    """Lines by number; a last one without its end counts, since files are written whole."""
    *lines, rest = path.read_bytes().split(b"\n")
    return list(enumerate([*lines, rest] if rest else lines, 1))


def _sample(line: bytes) -> Sample:
    row = json.loads(line.decode("utf-8", "surrogatepass"))
    return Sample(**{name: row[name] for name in _NAMES})


def printable(text: str) -> str:
    """Control characters as escapes: a model may write any, and a terminal or page would obey them."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


def sample_steps(directory: Path) -> list[int]:
    """Steps that have a samples file below `<run>/samples`, ascending."""
    names = (path.stem.removeprefix("step-") for path in directory.glob("step-*.jsonl"))
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())
