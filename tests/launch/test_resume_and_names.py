"""New ids, names, resumed runs and detached runs."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest
from launch_support import make_plan, wait_until

from miles_olmo.base.errors import LaunchError, UsageError
from miles_olmo.launch.local import LocalBackend
from miles_olmo.launch.preflight import check_machine
from miles_olmo.launch.run_id import create_run_directory
from miles_olmo.records.receipts import merge_receipts
from miles_olmo.records.runs import resolve_run
from miles_olmo.records.status import list_runs, read_control, read_status

pytestmark = pytest.mark.process
LONG = {"trainer": {"steps": 500, "step_seconds": 0.1}}


def files_of(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def types(run):
    return [e["type"] for e in merge_receipts(run.receipts).events if e["writer"] == "launcher"]


def test_of_two_launches_with_one_name_exactly_one_gets_it(launcher):
    children = [launcher.start(make_plan(), "--name", "same") for _ in range(2)]
    ended = [(child, *child.communicate(timeout=30)) for child in children]
    assert sorted(child.returncode for child, _, _ in ended) == [0, 2]
    refused = next(json.loads(output) for child, output, _ in ended if child.returncode)
    assert refused["code"] == "E500" and "runs/same" in refused["fix"]
    assert types(launcher.run("same")).count("attempt-started") == 1


def test_two_launches_of_one_plan_get_ids_of_their_own(launcher):
    children = [launcher.start(make_plan()) for _ in range(2)]
    ids = {json.loads(child.communicate(timeout=30)[0])["run_id"][-2:] for child in children}
    assert ids == {"-1", "-2"}


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "latest", "x" * 90, "a b"])
def test_a_name_that_cannot_be_an_id_is_refused(tmp_path, name):
    with pytest.raises(LaunchError) as caught:
        create_run_directory(tmp_path / "runs", make_plan(), name)
    assert caught.value.code == "E500" and not list((tmp_path / "runs").iterdir())


def test_a_runs_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(LaunchError) as caught:
        create_run_directory(tmp_path / "runs", make_plan())
    assert caught.value.code == "E508"


def test_a_run_is_found_by_id_prefix_path_and_latest(launcher):
    for name in ("alpha-1", "alpha-2", "beta"):
        assert launcher.launch(make_plan(), "--name", name)[0] == 0
    runs = launcher.runs
    assert resolve_run("alpha-1", runs).run_id == "alpha-1"
    assert resolve_run("b", runs).run_id == "beta"
    assert resolve_run(str(runs / "alpha-2"), Path("elsewhere")).run_id == "alpha-2"
    assert resolve_run("latest", runs).run_id == "beta"
    assert [status.run_id for status in list_runs(runs)] == ["alpha-1", "alpha-2", "beta"]
    for text, near in (("alpha", "alpha-1"), ("bata", "beta"), ("alhpa-2", "alpha-2")):
        with pytest.raises(UsageError) as caught:
            resolve_run(text, runs)
        assert caught.value.code == "E501" and near in caught.value.details["candidates"]
    with pytest.raises(UsageError):
        resolve_run("latest", runs / "none")


def test_a_resumed_run_goes_on_in_its_directory_as_a_new_attempt(launcher):
    child = launcher.start(
        make_plan(), "--name", "r", behave={"trainer": {"steps": 3, "linger": 60}}
    )
    assert wait_until(lambda: read_status(launcher.runs / "r").checkpoints == (3,))
    child.send_signal(signal.SIGKILL)
    child.wait()
    code, result, errors = launcher.launch(None, "--resume", "r")  # while the old jobs still end
    assert code == 0, errors
    status = read_status(launcher.runs / "r")
    assert (result["attempt"], status.outcome) == (2, "finished")
    assert [attempt.outcome for attempt in status.attempts] == ["crashed", "finished"]
    assert status.step == 6 and status.checkpoints == (3, 6) and status.problems == ()
    assert (launcher.run("r").logs(2) / "trainer.log").read_text().startswith("step 4")
    assert set(LocalBackend().logs(launcher.run("r"), 1)) == {"engine-0", "trainer"}


def test_a_resume_with_a_change_of_state_is_refused_and_changes_nothing(launcher):
    launcher.launch(make_plan(), "--name", "r", behave={"trainer": {"fail": "bare"}})
    before = files_of(launcher.runs)
    changed = make_plan(rollout__samples_per_prompt=4, steps=9)
    code, error, _ = launcher.launch(changed, "--resume", "r", "--accept-changes")
    assert code == 4 and "rollout.samples_per_prompt" in error["what"]
    code, error, _ = launcher.launch(make_plan(steps=9), "--resume", "r")
    assert code == 4 and "train.steps: 3 -> 9" in error["what"]
    assert files_of(launcher.runs) == before


def test_a_resume_to_a_step_that_was_passed_is_refused_and_changes_nothing(launcher):
    launcher.launch(make_plan(steps=9), "--name", "r")
    before = files_of(launcher.runs)
    code, error, _ = launcher.launch(make_plan(steps=3), "--resume", "r", "--accept-changes")
    assert code == 2 and error["code"] == "E507"
    assert files_of(launcher.runs) == before


@pytest.mark.parametrize("name", ["lock", "control.json", "receipts/launcher.jsonl"])
def test_a_run_that_cannot_be_written_is_not_resumed(launcher, name):
    """As on a disk that is read-only: a directory in the file's place refuses every user."""
    launcher.launch(make_plan(), "--name", "r", behave={"trainer": {"fail": "bare"}})
    path = launcher.run("r").root / name
    content = path.read_bytes()
    path.unlink()
    path.mkdir()
    code, error, errors = launcher.launch(None, "--resume", "r")
    assert "Traceback" not in errors and str(path) in error["what"]
    assert (code, error["code"]) in ((2, "E508"), (6, "E530"), (6, "E531"))
    path.rmdir()
    path.write_bytes(content)


def test_an_accepted_change_leaves_a_receipt_and_the_old_plan(launcher):
    launcher.launch(make_plan(), "--name", "r")
    assert launcher.launch(None, "--resume", "r")[1]["code"] == "E507"  # nothing left to do
    longer = make_plan(steps=9)
    code, result, errors = launcher.launch(longer, "--resume", "r", "--accept-changes")
    assert code == 0, errors
    run = launcher.run("r")
    accepted = [e for e in merge_receipts(run.receipts).events if e["type"] == "changes-accepted"]
    (change,) = accepted[0]["body"]["differences"]
    assert (change["key"], change["old"], change["new"]) == ("train.steps", 3, 9)
    status = read_status(run.root)
    assert (status.total_steps, status.plan_digest, result["attempt"]) == (9, longer.digest, 2)
    assert (run.root / "plan-attempt-1.json").exists()


def test_a_detached_run_comes_up_is_seen_refuses_a_resume_and_is_cancelled(launcher):
    code, result, errors = launcher.launch(
        make_plan(engines=2), "--name", "r", "--detach", behave=LONG
    )
    assert (code, result["outcome"]) == (0, "running"), errors
    status = read_status(launcher.runs / "r")
    assert status.outcome == "running" and len(status.engines) == 2
    assert all(job.alive for job in status.jobs) and len(status.jobs) == 3
    code, error, _ = launcher.launch(None, "--resume", "r")
    assert (code, error["code"]) == (2, "E505")
    backend = LocalBackend()
    assert backend.cancel(launcher.run("r")).outcome == "cancelled"
    assert launcher.nothing_left(0.5)
    assert backend.cancel(launcher.run("r")).outcome == "cancelled"
    assert types(launcher.run("r")).count("run-cancelled") == 1


def test_a_detached_run_that_fails_to_come_up_says_so(launcher):
    code, result, _ = launcher.launch(
        make_plan(), "--detach", behave={**LONG, "engine-0": "refuse"}
    )
    assert code == 6 and result["outcome"] == "failed"
    assert result["error"]["what"] == "no weights"


def test_an_interrupt_while_waiting_for_a_detached_run_ends_it(launcher):
    child = launcher.start(
        make_plan(), "--name", "r", "--detach", behave={**LONG, "engine-0": "never"}
    )
    started = lambda: len(read_control(launcher.run("r")).get("jobs", {})) == 2  # noqa: E731
    assert wait_until(started)
    child.send_signal(signal.SIGINT)
    output, _ = child.communicate(timeout=15)
    assert child.returncode == 130 and json.loads(output)["outcome"] == "cancelled"


def test_cancelling_never_touches_a_process_that_got_the_pid_later(launcher):
    launcher.launch(make_plan(), "--name", "r")
    control = read_control(launcher.run("r"))
    bystander = launcher.start(None, program="sleep.py")
    control["supervisor"]["pid"] = bystander.pid
    launcher.run("r").control.write_text(json.dumps(control))
    assert LocalBackend().cancel(launcher.run("r")).outcome == "finished"
    assert bystander.poll() is None


def test_a_taken_port_is_named_before_anything_is_written(launcher):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        plan = make_plan(engines=2, engines__base_port=port - 1)
        code, error, _ = launcher.launch(plan)
    assert (code, error["code"], error["details"]["port"]) == (2, "E502", port)
    assert not launcher.runs.exists()


def test_engines_listen_on_the_ports_of_the_plan(launcher):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    behave = {"trainer": {"linger": 1}}
    code, _, _ = launcher.launch(make_plan(engines__base_port=port), "--name", "r", behave=behave)
    assert code == 0
    assert read_status(launcher.runs / "r").engines[0].url == f"http://127.0.0.1:{port}"


def test_a_disk_that_is_too_small_is_refused(tmp_path):
    plan = make_plan()
    huge = plan.content.resolved.model_copy(update={"checkpoint_bytes": 2**60})
    plan = plan.model_copy(update={"content": plan.content.model_copy(update={"resolved": huge})})
    with pytest.raises(LaunchError) as caught:
        check_machine(plan, tmp_path / "runs")
    assert caught.value.code == "E504" and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("extra", "package", "changes"),
    [
        ("train", "safetensors", {}),
        ("tensorboard", "tensorboard", {"logging__tensorboard": True}),
        ("wandb", "wandb", {"logging__wandb": {"enabled": True}}),
    ],
)
def test_a_missing_package_is_named_with_the_pip_line(
    tmp_path, monkeypatch, extra, package, changes
):
    import sys

    plan = make_plan(**changes)
    jobs = [j.model_copy(update={"module": f"miles_olmo.jobs.{j.role}"}) for j in plan.content.jobs]
    content = plan.content.model_copy(update={"jobs": tuple(jobs)})
    plan = plan.model_copy(update={"content": content})
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(LaunchError) as caught:
        check_machine(plan, tmp_path / "runs")
    assert caught.value.code == "E503" and caught.value.details["missing"] == [package]
    assert "-m pip install" in caught.value.fix and f'[{extra}]"' in caught.value.fix
    assert not (tmp_path / "runs").exists()


def test_wandb_online_without_its_key_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    plan = make_plan(logging__wandb={"enabled": True, "mode": "online"})
    with pytest.raises(UsageError, match=r"E611.*WANDB_API_KEY"):
        check_machine(plan, tmp_path / "runs")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    check_machine(plan, tmp_path / "runs")  # its jobs are not ours, so no extra is asked for
