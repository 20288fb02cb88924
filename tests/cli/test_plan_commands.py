"""The planning commands as a user meets them: whole processes, exit codes, output."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_olmo.base.codes import CODES
from miles_olmo.plan.read import read_plan


def miles(*arguments, cwd, **environment):
    """Run the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "miles_olmo", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_plan_prints_a_summary_and_writes_the_plan(quickstart, tmp_path):
    done = miles("plan", quickstart, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    plan = read_plan(tmp_path / "quickstart.plan.json")
    for words in (
        plan.digest,
        "1,030,912 parameters",
        "16 prompts x 8 = 128 samples",
        "12 + 6 = 18 per sample, 2,304 per step",
        "engine-1",
        "made by the run: reversed_digits",
        "every 100 steps and at the end, 12.4 MB each",
        "miles launch quickstart.plan.json",
        f"runs/{plan.run_stem}-N/",
    ):
        assert words in done.stdout
    assert "\x1b[" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_plan_shows_hashes_of_own_files_and_prompts_left_out(own_data, tmp_path):
    path = own_data(("max_prompt_tokens = 12", "max_prompt_tokens = 10"))
    train = path.with_name("train.jsonl")
    train.write_text(train.read_text().replace("rev ", "rev 0", 1))
    done = miles("plan", path, "--out", tmp_path / "p.json", cwd=tmp_path)
    assert done.returncode == 0
    plan = read_plan(tmp_path / "p.json")
    assert all(f"sha256 {entry.sha256}" in done.stdout for entry in plan.content.inputs)
    assert "40 rows, 1 left out: prompt over max_prompt_tokens" in done.stdout


def test_json_output_is_one_document(quickstart, tmp_path):
    done = miles("plan", quickstart, "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    plan = read_plan(tmp_path / "quickstart.plan.json")
    assert document["schema"] == "miles-olmo/plan-result/v1"
    assert (document["digest"], document["path"]) == (plan.digest, "quickstart.plan.json")
    assert document["plan"] == json.loads((tmp_path / "quickstart.plan.json").read_text())


def test_the_plan_imports_nothing_heavy(quickstart, tmp_path):
    program = (
        "import sys, runpy\n"
        f"sys.argv = ['miles', 'plan', {str(quickstart)!r}]\n"
        "try: runpy.run_module('miles_olmo', run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "heavy = {'torch', 'olmo_core', 'vllm', 'transformers', 'numpy', 'rich', 'aiohttp'}\n"
        "sys.stderr.write(' '.join(sorted(loaded & heavy)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_validate_writes_nothing(quickstart, tmp_path):
    done = miles("validate", quickstart, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{quickstart}: valid\n")
    document = json.loads(miles("validate", quickstart, "--json", cwd=tmp_path).stdout)
    assert document["valid"] is True
    assert list(tmp_path.iterdir()) == []


def test_every_problem_is_printed_with_file_line_and_column(edited, tmp_path):
    edited(("temperature", "tempreature"), ("count = 2", "tensor_parallel = 2"))
    for command in ("plan", "validate"):
        done = miles(command, "run.toml", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (3, "")
        lines = done.stderr.splitlines()
        assert [line.split()[1] for line in lines[:-1]] == ["E003", "E106"]
        assert all(line.startswith("run.toml:") for line in lines[:-1])
        assert lines[-1] == "2 problems; more: miles explain CODE"
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_problems_come_as_json_too(edited, tmp_path):
    edited(("temperature", "tempreature"), ("count = 2", "count = 0"))
    done = miles("plan", "run.toml", "--json", cwd=tmp_path)
    assert done.returncode == 3
    document = json.loads(done.stdout)
    assert document["schema"] == "miles-olmo/error/v1"
    assert [error["code"] for error in document["errors"]] == ["E003", "E007"]
    assert {"file", "line", "column", "what", "why", "fix"} <= set(document["errors"][0])


def test_a_reader_that_stops_early_is_no_error(quickstart, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "miles_olmo", "plan", "absent.toml", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) in (0, 3)
    process.stderr.close()


def test_overrides_change_the_plan(quickstart, tmp_path):
    done = miles("plan", quickstart, "--set", "train.steps=7", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["plan"]["content"]["manifest"]["train"]["steps"] == 7
    done = miles("plan", quickstart, "--set", "train.steps", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("E602")


def test_an_output_that_cannot_be_written_is_a_usage_error(quickstart, tmp_path):
    (tmp_path / "directory").mkdir()
    done = miles("plan", quickstart, "--out", "directory", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("E604: cannot write directory")
    assert [path.name for path in tmp_path.rglob("*")] == ["directory"]


def test_explain_lists_and_explains(tmp_path):
    listing = miles("explain", cwd=tmp_path)
    assert [line.split()[0] for line in listing.stdout.splitlines()] == list(CODES)
    page = miles("explain", "e110", cwd=tmp_path)
    assert page.returncode == 0
    assert page.stdout.startswith("E110: ")
    assert CODES["E110"].cause in page.stdout
    document = json.loads(miles("explain", "E110", "--json", cwd=tmp_path).stdout)
    assert document["codes"][0]["code"] == "E110"


def test_an_unknown_code_gets_a_suggestion(tmp_path):
    done = miles("explain", "E1100", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "E601: unknown error code 'E1100'; no error has it; did you mean 'E110'?\n"
    )


@pytest.mark.parametrize(
    "arguments", [["plam"], ["plan"], ["plan", "--ouput", "x"], ["explain", "E003", "x"]]
)
def test_a_wrong_command_line_is_a_usage_error(arguments, tmp_path):
    done = miles(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    document = json.loads(miles(*arguments, "--json", cwd=tmp_path).stdout)
    assert document["errors"][0]["code"] == "E600"
    if arguments == ["plam"]:
        assert "Did you mean 'plan'?" in done.stderr


def test_prepare_makes_the_data_set(quickstart, tmp_path):
    done = miles("prepare", quickstart, "--set", "data.prepare.num_train=300", cwd=tmp_path)
    assert done.returncode == 0
    names = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert names == ["evaluation.jsonl", "prepare.json", "tokenizer.json", "train.jsonl"]
    assert len((tmp_path / "data" / "train.jsonl").read_text().splitlines()) == 300
    again = miles("prepare", quickstart, "--set", "data.prepare.num_train=300", cwd=tmp_path)
    assert again.stdout == done.stdout


def test_prepare_needs_something_to_prepare(own_data, tmp_path):
    done = miles("prepare", own_data(), "--out", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("E603")
    assert not (tmp_path / "out").exists()


def test_prepare_never_overwrites_what_it_did_not_make(quickstart, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("mine")
    done = miles("prepare", quickstart, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("E137")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["train.jsonl"]


def test_a_secret_in_the_environment_or_the_manifest_is_never_shown(edited, tmp_path):
    edited(("count = 2", 'count = 2\napi_key = "canary-5417"'))
    refused = miles("plan", "run.toml", "--json", cwd=tmp_path)
    assert "canary" not in refused.stdout + refused.stderr
    edited()
    done = miles("plan", "run.toml", cwd=tmp_path, HF_TOKEN="canary-5417")
    assert "canary" not in done.stdout + done.stderr
    assert "canary" not in Path(tmp_path / "quickstart.plan.json").read_text()


def test_set_without_a_manifest_is_refused_rather_than_ignored(tmp_path):
    done = miles("launch", "--resume", "some-run", "--set", "train.steps=9", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("E506")
