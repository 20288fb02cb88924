"""A directory that is there completely or not at all.

Ordering contract: every file is written and synced inside a hidden directory beside the target, then
that directory is synced, then renamed, then the parent is synced. A process killed at any point
leaves the old target, the new one, or (only while an existing target is being replaced) neither
beside a hidden leftover; `remove_leftovers` clears those.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from miles_olmo.base.files import sync_directory

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.\d+\.(?:writing|replaced|removed)")


@contextlib.contextmanager
def atomic_directory(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a hidden directory to fill; it becomes `target` when the block ends without an error.

    Its parent is made, and nothing above that. An existing target is replaced. On any error the hidden directory is removed and the target is
    as it was.

    Args:
        durable: Sync everything, so that the target survives a power failure once the block has
            ended. Without it other processes see the same, only faster.

    Raises:
        OSError: the directory could not be written, synced or renamed.
    """
    target.parent.mkdir(exist_ok=True)
    writing = _hidden(target, "writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir()
    try:
        yield writing
        if durable:
            _sync_tree(writing)
        _swap(writing, target, durable=durable)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise


def remove_directory(target: Path, *, durable: bool = True) -> None:
    """Remove a directory so that a kill half-way leaves no visible part of it."""
    removed = _hidden(target, "removed")
    shutil.rmtree(removed, ignore_errors=True)
    target.replace(removed)
    if durable:
        sync_directory(target.parent)
    shutil.rmtree(removed)


def remove_leftovers(parent: Path, names: str) -> list[str]:
    """Remove hidden directories that killed processes left in `parent`; returns their names.

    Args:
        names: Regular expression of the targets' names, e.g. r"step-\\d{6,}". Only one process may
            write such targets in `parent`.
    """
    removed = []
    for entry in sorted(parent.iterdir()) if parent.is_dir() else []:
        match = _LEFTOVER.fullmatch(entry.name)
        if match and re.fullmatch(names, match["name"]):
            shutil.rmtree(entry)
            removed.append(entry.name)
    return removed


def _hidden(target: Path, purpose: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{purpose}")


def _swap(writing: Path, target: Path, *, durable: bool) -> None:
    replaced = _hidden(target, "replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    had_target = target.exists()
    if had_target:  # a directory that is not empty cannot be replaced by a rename
        target.replace(replaced)
    try:
        writing.replace(target)
    except OSError:
        if had_target:
            replaced.replace(target)
        raise
    if durable:
        sync_directory(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync_tree(root: Path) -> None:
    """Make every file and directory below `root` durable, leaves first."""
    for directory, _, files in os.walk(root, topdown=False):
        for name in files:
            descriptor = os.open(Path(directory, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(Path(directory))
