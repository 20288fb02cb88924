"""How much each expert was used: one JSON line per trained step in `expert_load.jsonl`.

    {"step": 12, "attempt": 1, "load_LE": [[1.02, 0.97, ...], ...]}

Load is in units of an expert's uniform share, `load_e * E / (T * k)`: 1 when balanced, 0 when never
used. It has a file of its own because it is large beside the metrics, which are read every second.

Dimension legend: L routed layers, E experts per layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_olmo.records.lines import LineLog

_DIGITS = 4


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """The load of one step."""

    step: int
    attempt: int
    load_LE: tuple[tuple[float, ...], ...]
    """In units of the uniform share."""


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """The rows that count, by step."""

    rows: tuple[ExpertLoad, ...]
    problems: tuple[str, ...]
    """Lines that could not be read, with file and line."""


class ExpertLoadLog(LineLog):
    """Appends rows to `expert_load.jsonl`."""

    def append(self, step: int, attempt: int, load_LE: Sequence[Sequence[float]]) -> None:
        """Add the load of one step."""
        rounded = [[round(load, _DIGITS) for load in layer] for layer in load_LE]
        self.append_line({"step": step, "attempt": attempt, "load_LE": rounded})


def read_expert_load(path: Path, attempts: Mapping[int, int]) -> ExpertLoads:
    """Read `expert_load.jsonl`; an absent file holds no rows.

    Args:
        attempts: Step -> attempt whose row of that step counts, from the metrics: other rows are
            of steps that a later attempt walked again, or that never finished.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return ExpertLoads((), ())
    except OSError as error:
        return ExpertLoads((), (f"{path}: {error.strerror or error}",))
    rows: dict[int, ExpertLoad] = {}
    problems = []
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        row = _parse(line)
        if row is None:
            problems.append(f"{path}:{number}: not an expert load row")
        elif attempts.get(row.step) == row.attempt:
            rows[row.step] = row
    return ExpertLoads(tuple(rows[step] for step in sorted(rows)), tuple(problems))


def _parse(line: bytes) -> ExpertLoad | None:
    try:
        value: Any = json.loads(line)
        load_LE = tuple(tuple(float(load) for load in layer) for layer in value["load_LE"])
        row = ExpertLoad(value["step"], value["attempt"], load_LE)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    sizes = {len(layer) for layer in row.load_LE}
    finite = all(math.isfinite(load) for layer in row.load_LE for load in layer)
    is_row = type(row.step) is int and type(row.attempt) is int and len(sizes) == 1
    return row if is_row and finite and 0 not in sizes else None
