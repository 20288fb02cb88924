"""Atomic writes: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = True) -> None:
    """Write `data` to `path` through a temporary file, fsync and `os.replace`.

    The folder of `path` is made, and none above it: a run's directory that is gone is not made anew.

    Args:
        durable: Survive a power failure once this has returned. Without it (no fsync) other
            processes see the same, only faster.
    """
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    if durable:
        sync_directory(path.parent)


def write_json(path: Path, value: Any, *, mode: int = 0o644) -> None:
    """Write `value` as indented JSON, atomically."""
    write_atomic(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode(), mode=mode)


def sync_directory(path: Path) -> None:
    """Make a rename inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def held_directory(source: Path, target: Path) -> Iterator[Path]:
    """The files of a directory under second names, which stay when the first are removed.

    Directories inside it are left out. Links; copies on another disk, or where links are not allowed.
    `target` is made, and removed when the block ends.

    Raises:
        FileNotFoundError: `source` is not there, or not any more.
        OSError: `target` cannot be written.
    """
    names = sorted(path.name for path in source.iterdir() if not path.is_dir())
    target.mkdir(parents=True)
    try:
        for name in names:
            try:
                (target / name).hardlink_to(source / name)
            except FileNotFoundError:
                raise
            except OSError:
                shutil.copyfile(source / name, target / name)
        yield target
    finally:
        shutil.rmtree(target, ignore_errors=True)
