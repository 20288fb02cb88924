"""`miles doctor` tells what works from what is missing or broken."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from miles_olmo.launch import doctor
from miles_olmo.launch.doctor import examine_machine

QUICK = {
    "torch": "import json; print('noise'); print(json.dumps({'devices': ['cpu'], 'failed': {}}))",
    "olmo_core": "raise ImportError('no such symbol')",
    "vllm": "import time; time.sleep(60)",
}


def test_a_broken_package_is_told_from_a_missing_one(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_PROBES", QUICK)
    report = examine_machine(tmp_path)
    states = {probe.module: (probe.state, probe.detail) for probe in report.probes}
    assert states["torch"] == ("works", "")
    assert states["olmo_core"] == ("broken", "ImportError: no such symbol")
    assert states["vllm"] == ("missing", "not installed") and report.is_broken
    assert report.engines == {"core": "olmo_core is broken", "vllm": "vllm is missing"}
    assert "[beaker]" in report.fixes["beaker"] and "-m pip install" in report.fixes["beaker"]
    assert "CUDA" in report.fixes["serve"]  # only a CPU works here
    assert "train" not in report.fixes
    versions = {package.name: package.version for package in report.extras["base"]}
    assert versions["pydantic"] and set(report.extras) >= {"base", "train", "serve"}


def test_an_import_that_hangs_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_PROBES", {"torch": QUICK["vllm"]})
    started = time.monotonic()
    (probe,) = examine_machine(tmp_path, probe_seconds=0.5).probes
    assert probe.state == "broken" and "0.5 s" in probe.detail and time.monotonic() - started < 5


@pytest.mark.process
def test_the_real_packages_work_here():
    command = [sys.executable, "-m", "miles_olmo", "doctor"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    words = [line.split() for line in answer.stdout.splitlines()]
    assert ["torch", "works"] in words and ["core", "works"] in words and ["cpu", "works"] in words
