from __future__ import annotations

from pathlib import Path

import pytest
from rollout_engines import EngineThread
from table_model import write_publication


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "engines"


@pytest.fixture
def publications(tmp_path: Path):
    return [write_publication(tmp_path / "publish", version) for version in (1, 2)]


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory):
    """For tests that leave no trace in the engine."""
    with EngineThread() as running:
        running.publish(write_publication(tmp_path_factory.mktemp("publish"), 1))
        yield running


@pytest.fixture
def engine(publications):
    with EngineThread() as running:
        running.publish(publications[0])
        yield running
