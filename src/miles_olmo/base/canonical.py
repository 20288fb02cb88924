"""Canonical JSON (RFC 8785) and digests: equal values have equal bytes on every machine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import rfc8785


def canonical_json(value: Any) -> bytes:
    """RFC 8785 bytes of a JSON value.

    Raises:
        rfc8785.CanonicalizationError: for NaN, infinities, integers at or above 2**53, other types.
    """
    return rfc8785.dumps(value)


def digest(value: Any) -> str:
    """sha256 (64 hex digits) over the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_sha256(path: Path) -> str:
    """sha256 (64 hex digits) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
