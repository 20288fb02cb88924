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


@pytest.fixture
def own_data(edited: Callable[..., Path]) -> Callable[..., Path]:
    """A manifest whose data files lie beside it, with some texts replaced."""
    from miles_olmo.manifest.reading import read_manifest
    from miles_olmo.tasks.prepare import prepare_data

    def write(*changes: tuple[str, str]) -> Path:
        small = [
            ("num_train = 4096", "num_train = 40"),
            ("num_evaluation = 256", "num_evaluation = 20"),
        ]
        path = edited(*small)
        prepare_data(read_manifest(path)[0].data, path.parent)
        text = QUICKSTART.read_text()
        start, end = text.index("[data.prepare]"), text.index("[warmup]")
        path.write_text(text[:start] + text[end:].replace("num_prompts = 256", "num_prompts = 20"))
        for old, new in changes:
            text = path.read_text()
            assert old in text, f"{old!r} is not in the manifest"
            path.write_text(text.replace(old, new, 1))
        return path

    return write
