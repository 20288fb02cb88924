"""What many tests need: the quickstart manifest, and a way to change it."""

from collections.abc import Callable
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[1] / "manifests" / "quickstart.toml"


@pytest.fixture
def quickstart() -> Path:
    """The recipe that the project ships."""
    return QUICKSTART


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Write the quickstart manifest with some texts replaced; each must be there."""

    def write(*changes: tuple[str, str], name: str = "run.toml") -> Path:
        text = QUICKSTART.read_text()
        for old, new in changes:
            assert old in text, f"{old!r} is not in the quickstart manifest"
            text = text.replace(old, new, 1)
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
