"""One run seed, many independent streams: every random decision names what it is for."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. `derive_seed(seed, "sample", group_id, attempt, index)`.

    Streams of different purposes are independent (sha256), and equal on every machine.
    """
    text = "\x1f".join([str(run_seed), *map(str, purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
