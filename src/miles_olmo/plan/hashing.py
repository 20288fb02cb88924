"""What a plan pins: bytes of inputs and of the code."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import miles_olmo
from miles_olmo.base.canonical import digest, file_sha256
from miles_olmo.plan.model import CodeVersion, PlanInput


def hash_input(path: Path) -> tuple[str, int]:
    """sha256 and bytes of a file, or of a directory: over its sorted relative paths and file hashes.

    Raises:
        OSError: it is not there, or not readable.
    """
    if not path.is_dir():
        return file_sha256(path), path.stat().st_size
    files = sorted(entry for entry in path.rglob("*") if entry.is_file())
    hashes = [[file.relative_to(path).as_posix(), file_sha256(file)] for file in files]
    return digest(hashes), sum(file.stat().st_size for file in files)


def local_input(key: str, written: str, base: Path) -> PlanInput:
    """A file that is already there, hashed.

    Raises:
        OSError: it is not there, or not readable.
    """
    sha256, num_bytes = hash_input(base / written)
    return PlanInput(key=key, kind="local", path=written, sha256=sha256, num_bytes=num_bytes)


@cache
def code_version() -> CodeVersion:
    """The package that is running: its version, and a hash of every .py file."""
    package = Path(miles_olmo.__file__).parent
    files = sorted(package.rglob("*.py"), key=lambda file: file.relative_to(package).as_posix())
    total = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        name = file.relative_to(package).as_posix()
        total.update(f"{name}\n{len(content)}\n".encode())
        total.update(content)
    return CodeVersion(version=miles_olmo.__version__, source_sha256=total.hexdigest())


def git_commit() -> str | None:
    """Commit of the repository that the package lies in as `src/miles_olmo`, if it does."""
    root = Path(miles_olmo.__file__).parents[2]
    if not (root / ".git").exists():
        return None
    import subprocess

    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here: the commit is a courtesy
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
