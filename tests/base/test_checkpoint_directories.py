"""What stands in `checkpoints/` and is no checkpoint: a step that is listed can always be opened."""

import pytest

from miles_olmo.base.files import held_directory
from miles_olmo.base.rundir import RunDirectory


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    for step in (10, 1_000_000):
        run.checkpoint(step).mkdir(parents=True)
        (run.checkpoint(step) / "state.json").write_text("{}")
    return run


@pytest.mark.parametrize("name", ["step-0000009", "step-0000010", "step-٠٠٠٠٢٠", "step-20"])
def test_other_names_for_a_step_are_not_listed(run, name):
    (run.checkpoints / name).mkdir()
    assert run.checkpoint_steps() == [10, 1_000_000]


def test_files_and_dead_links_are_not_listed(run):
    run.checkpoint(20).write_text("")
    run.checkpoint(30).symlink_to("nowhere")
    assert run.checkpoint_steps() == [10, 1_000_000]


def test_a_directory_inside_a_checkpoint_is_not_held(run, tmp_path):
    (run.checkpoint(10) / "mine").mkdir()
    with held_directory(run.checkpoint(10), tmp_path / "held") as held:
        assert [path.name for path in held.iterdir()] == ["state.json"]
