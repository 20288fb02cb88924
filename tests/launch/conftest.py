"""Every test here that launches something must leave no process behind."""

from __future__ import annotations

import pytest
from launch_support import Launcher


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    for child in launcher.children:
        if child.poll() is None:
            child.kill()
        child.communicate()
    assert launcher.nothing_left(15), "a launch left processes behind"
