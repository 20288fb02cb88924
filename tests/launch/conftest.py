"""Every test here that launches something must leave no process behind."""

from __future__ import annotations

import pytest
from launch_support import Launcher

from miles_olmo.launch.local import LocalBackend


@pytest.fixture
def launcher(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    for child in launcher.children:
        if child.poll() is None:
            child.kill()
        if child.stdout and not child.stdout.closed:
            child.communicate()
    for path in launcher.runs.glob("*/control.json"):
        LocalBackend().cancel(launcher.run(path.parent.name))
    assert launcher.nothing_left(15), "a launch left processes behind"
