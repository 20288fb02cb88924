"""Sampled answers of a step, to be read by people: `samples/step-000012.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from miles_olmo.base.errors import UsageError
from miles_olmo.base.files import write_atomic


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
    names = [field.name for field in fields(Sample)]
    samples = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = json.loads(line.decode("utf-8", "surrogatepass"))
            samples.append(Sample(**{name: row[name] for name in names}))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                "E533",
                f"{path}:{number} is not a sample",
                why=f"reading it failed with {type(error).__name__}: {error}",
                fix="delete the file; samples are for reading and nothing depends on them",
            ) from error
    return samples


def printable(text: str) -> str:
    """Control characters as escapes: a model may write any, and a terminal or page would obey them."""
    return "".join(
        c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )


def sample_steps(directory: Path) -> list[int]:
    """Steps that have a samples file below `<run>/samples`, ascending."""
    names = (path.stem.removeprefix("step-") for path in directory.glob("step-*.jsonl"))
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())
