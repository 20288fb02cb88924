"""The commands that start and read runs, through the real command line."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys

import pytest
from launch_support import make_plan, wait_until

from miles_olmo.cli.main import main
from miles_olmo.records.status import read_status

pytestmark = pytest.mark.process
LONG = {"trainer": {"steps": 500, "step_seconds": 0.1}}


@pytest.fixture
def miles(launcher):
    """Run the command in the runs' parent directory: (exit code, standard output, standard error)."""

    def run(*arguments, behave=None):
        child = subprocess.run(
            [sys.executable, "-m", "miles_olmo", *map(str, arguments)],
            cwd=launcher.directory,
            env={**launcher.environment, "FAKE_JOBS": json.dumps(behave or {})},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return child.returncode, child.stdout, child.stderr

    return run


def test_launch_of_a_plan_file_then_status_samples_and_logs(launcher, miles):
    path = launcher.write_plan(make_plan())
    code, output, errors = miles("launch", path, "--name", "first")
    assert code == 0, errors
    assert "first finished" in output and "train 3/3" in errors
    code, _, errors = miles("samples", "first", "--best", "--worst")
    assert code == 2 and errors.startswith("E612")
    code, output, _ = miles("status")
    assert code == 0 and re.search(r"first\s+finished .* train 3/3\s+0.300\s+0.500", output)
    code, output, _ = miles("status", "fir")
    assert "reward curve" in output and "checkpoints" in output and "3: 0.500" in output
    document = json.loads(miles("status", "latest", "--json")[1])
    assert (document["schema"], document["step"]) == ("miles-olmo/status/v1", 3)
    assert document["latest"]["train"]["values"]["rollout/reward"] == 0.3
    code, output, _ = miles("samples", "first", "--step", 2, "--best", "--limit", 2)
    assert code == 0 and output.index("2.2  reward 1") < output.index("2.1  reward 0.5")
    worst = json.loads(miles("samples", "first", "--worst", "--limit", 1, "--json")[1])
    assert worst["total"] == 3 and worst["samples"][0]["reward"] == 0.0
    code, output, _ = miles("logs", "first", "--job", "trainer", "--lines", 2)
    assert output == "step 2\nstep 3\n"
    assert "engine-0 | " in miles("logs", "first")[1]


@pytest.mark.parametrize("folder", ["runs", "other runs"])
def test_the_next_commands_can_be_typed_as_they_are_printed(launcher, folder):
    def typed(line):
        """A line of a shell, in the directory that the run was launched in."""
        return subprocess.run(
            ["sh", "-c", f'miles() {{ "$PYTHON" -m miles_olmo "$@"; }}; {line}'],
            cwd=launcher.directory,
            env={**launcher.environment, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=60,
        )

    path = launcher.write_plan(make_plan())
    launched = typed(f"FAKE_JOBS='{json.dumps(LONG)}' miles launch {path} --detach --name r "
                     f"--runs '{folder}'")  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    named = "r" if folder == "runs" else f"'{launcher.directory / folder / 'r'}'"
    assert f"miles status {named}\n" in launched.stdout
    for line in re.findall(r"miles .*", launched.stdout):
        if "--follow" not in line:
            answer = typed(line)
            assert answer.returncode == 0, answer.stderr
    assert "r cancelled" in answer.stdout  # `miles cancel` is the last of them
    (resume,) = re.findall(r"miles launch .*", answer.stdout)
    assert resume in typed(f"miles status r --runs '{folder}'").stdout
    finished = typed("FAKE_JOBS='{}' " + resume)
    assert finished.returncode == 0, finished.stderr
    for line in re.findall(r"miles .*", finished.stdout):
        assert typed(line).returncode == 0


def test_a_launch_that_fails_prints_the_last_lines_and_ends_with_the_code_of_the_error(
    launcher, miles
):
    path = launcher.write_plan(make_plan())
    behave = {"trainer": {"fail": "named", "lines": 30}}
    code, output, errors = miles("launch", path, "--name", "r", behave=behave)
    assert (code, output) == (6, "")
    assert "  line 29" in errors and "  line 10\n" in errors and "  line 9\n" not in errors
    assert "trainer: E512: loss is NaN; it is; lower it" in errors
    assert "error of trainer: E512: loss is NaN" in miles("status", "r")[1]
    code, output, _ = miles("launch", path, "--name", "r", "--json")
    assert code == 2 and json.loads(output)["errors"][0]["code"] == "E500"


def test_detach_status_logs_and_cancel(launcher, miles):
    path = launcher.write_plan(make_plan())
    code, output, errors = miles("launch", path, "--detach", "--name", "r", behave=LONG)
    assert code == 0 and output.startswith("r is up"), errors
    status = json.loads(miles("status", "r", "--json")[1])
    assert status["outcome"] == "running" and all(job["alive"] for job in status["jobs"])
    assert re.search(r"engines +1/1\n", miles("status", "r")[1])
    code, output, _ = miles("cancel", "r", "--json")
    assert code == 0 and json.loads(output)["outcome"] == "cancelled"
    code, output, _ = miles("cancel", "r")
    assert (code, output) == (0, "r was not running: it was cancelled\n")
    follow = miles("logs", "r", "--job", "trainer", "--lines", 1, "--follow")
    assert follow[0] == 0 and re.fullmatch(r"step \d+\n", follow[1])


def test_a_copy_of_a_living_run_is_not_running_and_cannot_end_it(launcher, miles):
    miles("launch", launcher.write_plan(make_plan()), "--detach", "--name", "r", behave=LONG)
    copy, original = launcher.runs / "copy", launcher.run("r").root
    shutil.copytree(original, copy)
    code, output, _ = miles("status", "copy")
    assert code == 0 and "a copy, not running" in output and "pid" not in output
    assert f"it was copied from {original}" in output
    assert re.search(r"r +running .*\n?", miles("status")[1])
    code, output, _ = miles("cancel", "copy")
    assert (code, output) == (0, f"copy was not running: it is a copy of {original}\n")
    assert miles("logs", "copy", "--follow")[0] == 0  # ends at once
    step = read_status(original).step
    assert wait_until(lambda: read_status(original).step > step + 2)
    assert read_status(original).outcome == "running"
    shutil.rmtree(copy)


def test_following_logs_shows_everything_until_the_run_ends(launcher, miles):
    path = launcher.write_plan(make_plan())
    behave = {"trainer": {"steps": 30, "step_seconds": 0.05}}
    assert miles("launch", path, "--detach", "--name", "r", behave=behave)[0] == 0
    code, output, _ = miles("logs", "r", "--job", "trainer", "--lines", 1000, "--follow")
    assert code == 0 and output.splitlines() == [f"step {n}" for n in range(1, 31)]


def test_what_does_not_exist_is_named_with_what_does(launcher, monkeypatch, capsys):
    launcher.launch(make_plan(), "--name", "alpha")
    monkeypatch.chdir(launcher.directory)

    def miles(*arguments):
        monkeypatch.setattr(sys, "argv", ["miles", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    for arguments, code, hint in (
        (("status", "alhpa"), "E501", "alpha"),
        (("cancel", "beta"), "E501", ""),
        (("samples", "alpha", "--step", "9"), "E519", "steps 1 to 3"),
        (("logs", "alpha", "--job", "trianer"), "E519", "trainer"),
        (("logs", "alpha", "--attempt", "7"), "E519", ""),
        (("launch",), "E509", ""),
        (("launch", "--resume", "alpha", "--name", "b"), "E509", ""),
    ):
        exit_code, output, errors = miles(*arguments)
        assert exit_code == 2 and not output and code in errors and hint in errors
        exit_code, output, _ = miles(*arguments, "--json")
        assert exit_code == 2 and json.loads(output)["errors"][0]["code"] == code


def test_a_directory_without_runs_is_no_error(miles):
    assert miles("status") == (0, "no runs in runs\n", "")
    assert json.loads(miles("status", "--json")[1])["runs"] == []


def test_a_damaged_run_directory_is_still_shown(launcher, miles):
    miles("launch", launcher.write_plan(make_plan()), "--name", "r")
    run = launcher.run("r")
    control = run.control.read_text()
    run.control.write_text("{")
    raw = run.receipt_log("launcher").read_bytes()
    run.receipt_log("launcher").write_bytes(raw.replace(b'"job":"trainer"', b'"job":"tRainer"'))
    code, output, _ = miles("status", "r")
    assert code == 0 and "finished" in output
    assert output.count("damaged: ") == 3 and "the line was edited" in output
    run.metrics.write_text("damaged\n" * 500)
    _, output, _ = miles("status", "r")
    assert output.count("damaged: ") == 21 and "damaged: 483 more" in output
    run.control.write_text(control)


def test_on_a_terminal_the_run_is_drawn_and_ctrl_c_ends_it(launcher):
    path = launcher.write_plan(make_plan())
    behave = {"trainer": {"steps": 500, "step_seconds": 0.05}}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(launcher.directory)
        environment = {**launcher.environment, "FAKE_JOBS": json.dumps(behave), "TERM": "xterm"}
        argv = [sys.executable, "-m", "miles_olmo", "launch", str(path), "--name", "r"]
        os.execve(sys.executable, argv, environment)
    drawn = b""
    is_training = lambda: read_status(launcher.runs / "r").step > 20  # noqa: E731
    try:
        while not is_training():
            drawn += os.read(terminal, 65536)
        os.write(terminal, b"\x03")
        while chunk := os.read(terminal, 65536):
            drawn += chunk
    except OSError:  # Linux reports the end of a terminal as an error
        pass
    _, state = os.waitpid(pid, 0)
    text = drawn.decode()
    assert os.waitstatus_to_exitcode(state) == 130
    assert "━" in text and "reward curve" in text and "r cancelled" in text


def test_a_reader_that_goes_away_does_not_end_the_run(launcher):
    path = launcher.write_plan(make_plan())
    child = subprocess.Popen(
        [sys.executable, "-m", "miles_olmo", "launch", str(path), "--name", "r"],
        cwd=launcher.directory,
        env={**launcher.environment, "FAKE_JOBS": "{}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert child.stderr is not None
    child.stderr.close()
    child.wait(timeout=30)
    assert read_status(launcher.runs / "r").outcome == "finished"


def test_a_supervisor_that_is_killed_shows_as_crashed(launcher, miles):
    path = launcher.write_plan(make_plan())
    miles("launch", path, "--detach", "--name", "r", behave=LONG)
    os.kill(json.loads(launcher.run("r").control.read_text())["supervisor"]["pid"], signal.SIGKILL)
    assert launcher.nothing_left(10)
    code, output, _ = miles("status", "r")
    assert code == 0 and "crashed" in output and "miles launch --resume r" in output
    assert wait_until(lambda: miles("cancel", "r")[:2] == (0, "r was not running: it crashed\n"), 5)
