"""GPUs are counted and looked at before a launch, and each job is shown its own."""

import os
import sys

import pytest

from miles_olmo.base.errors import LaunchError
from miles_olmo.launch.commands import JobCommand, job_environment
from miles_olmo.launch.gpus import VISIBLE_GPUS_VARIABLE, check_gpus, query_gpus

IDLE = "{0}, GPU-{0}, NVIDIA H200, 143771, 4"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose nvidia-smi prints these lines, and a user without a choice of GPUs."""
    monkeypatch.delenv(VISIBLE_GPUS_VARIABLE, raising=False)

    def build(*lines, exit_code=0):
        program = tmp_path / "nvidia-smi"
        text = "\n".join(lines)
        program.write_text(
            f"#!{sys.executable}\nimport sys\nprint({text!r})\nsys.exit({exit_code})\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return build


def command(gpu):
    return JobCommand("trainer", "trainer", ("python",), 1, gpu=gpu)


def environment(gpu, tmp_path):
    return job_environment(command(gpu), tmp_path / "token", 3)


def test_idle_gpus_pass(machine):
    machine(*(IDLE.format(i) for i in range(2)))
    check_gpus([0, 1, 0])
    assert [(gpu.index, gpu.total_mib) for gpu in query_gpus()] == [("0", 143771), ("1", 143771)]


def test_too_few_gpus_are_refused_with_both_numbers(machine):
    machine(IDLE.format(0))
    with pytest.raises(LaunchError, match="needs 2 GPUs and the machine has 1") as caught:
        check_gpus([0, 1])
    assert caught.value.code == "E518"


def test_a_gpu_in_use_is_refused_by_its_number(machine):
    machine(IDLE.format(0), "1, GPU-1, NVIDIA H200, 143771, 90000")
    check_gpus([0])
    with pytest.raises(LaunchError, match=r"GPU 1 .* has 90,000 of 143,771 MiB in use") as caught:
        check_gpus([0, 1])
    assert caught.value.code == "E520"


@pytest.mark.parametrize("chosen", ["1", "GPU-1", "1,0", "GPU-1, 0"])
def test_the_users_choice_of_gpus_decides_which_are_looked_at(machine, monkeypatch, chosen):
    machine("0, GPU-0, NVIDIA H200, 143771, 90000", IDLE.format(1))
    monkeypatch.setenv(VISIBLE_GPUS_VARIABLE, chosen)
    check_gpus([0])


@pytest.mark.parametrize(("chosen", "message"), [("", "0 of them usable"), ("7", "7 unknown")])
def test_a_choice_that_leaves_no_gpu_is_refused(machine, monkeypatch, chosen, message):
    machine(IDLE.format(0))
    monkeypatch.setenv(VISIBLE_GPUS_VARIABLE, chosen)
    with pytest.raises(LaunchError, match=message):
        check_gpus([0])


@pytest.mark.parametrize("lines", [(), ("No devices were found",), ("0, GPU-0, H200, [N/A], 4",)])
def test_a_machine_without_gpus_is_an_error_that_says_so(machine, lines):
    machine(*lines, exit_code=0 if lines[-1:] == ("0, GPU-0, H200, [N/A], 4",) else 6)
    with pytest.raises(LaunchError) as caught:
        check_gpus([0])
    assert caught.value.code == "E518"


def test_each_job_sees_its_own_gpu_only(monkeypatch, tmp_path):
    monkeypatch.delenv(VISIBLE_GPUS_VARIABLE, raising=False)
    assert environment(1, tmp_path)[VISIBLE_GPUS_VARIABLE] == "1"
    monkeypatch.setenv(VISIBLE_GPUS_VARIABLE, "GPU-5, GPU-3")
    assert environment(1, tmp_path)[VISIBLE_GPUS_VARIABLE] == "GPU-3"


def test_a_job_on_the_cpu_keeps_the_users_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(VISIBLE_GPUS_VARIABLE, "GPU-5")
    assert environment(None, tmp_path)[VISIBLE_GPUS_VARIABLE] == "GPU-5"
