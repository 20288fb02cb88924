"""Plain text that people like to read: aligned columns, short numbers, colour only where it shows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TextIO


def wants_color(stream: TextIO) -> bool:
    """Colour only on a terminal, and not when NO_COLOR (https://no-color.org) is set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream.isatty()


def bold(text: str, *, color: bool) -> str:
    return f"\x1b[1m{text}\x1b[0m" if color else text


def columns(rows: Sequence[Sequence[str]], *, indent: int = 2) -> list[str]:
    """Rows with each column as wide as its longest cell."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return [" " * indent + line.rstrip() for line in lines]


def count(number: int, noun: str, plural: str | None = None) -> str:
    """`1 step`, `1,200 steps`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(num_bytes: int) -> str:
    """`512 B`, `12.4 MB`, in powers of 1000."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.95 or unit == "TB":
            return f"{value:.1f} {unit}"
    raise AssertionError("unreachable")
