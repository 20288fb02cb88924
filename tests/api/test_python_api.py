"""The package `miles_olmo.api` offers what the command line does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from miles_olmo import api


def test_every_name_that_is_offered_is_there():
    assert dir(api) == sorted(api.__all__)
    for name in api.__all__:
        assert callable(getattr(api, name)), name


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'launch_missiles'"):
        _ = api.launch_missiles


def test_a_plan_made_from_python_is_the_plan_of_the_command_line(quickstart, tmp_path):
    out = tmp_path / "plan.json"
    command = [sys.executable, "-m", "miles_olmo", "plan", str(quickstart), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    assert api.make_plan(quickstart).digest == api.read_plan(out).digest


def test_reading_a_status_does_not_load_what_planning_needs(tmp_path):
    program = (
        "import sys; from pathlib import Path; from miles_olmo import api;"
        f"api.list_runs(Path({str(tmp_path)!r}));"
        "print([m for m in ('pydantic', 'torch', 'tokenizers') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert output.stdout.strip() == "[]", output.stderr
