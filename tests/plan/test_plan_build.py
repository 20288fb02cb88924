"""What a plan says, and that its digest covers exactly what decides the run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import miles_olmo
from miles_olmo.manifest.fields import all_keys
from miles_olmo.plan.build import build_plan
from miles_olmo.plan.hashing import code_version

QUICKSTART = Path(__file__).parents[2] / "manifests" / "quickstart.toml"
TEXT = QUICKSTART.read_text()


def as_toml(document, order, pad, comment):
    """The document again, keys and tables in another order and with other blanks."""
    lines = []

    def literal(value):
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, list):
            return "[" + ", ".join(map(literal, value)) + "]"
        return f'"{value}"' if isinstance(value, str) else repr(value)

    def table(name, content):
        if name:
            lines.append(f"{pad}[{name}]{comment}")
        scalars = [key for key in content if not isinstance(content[key], dict)]
        tables = [key for key in content if isinstance(content[key], dict)]
        for key in order(scalars):
            lines.append(f"{pad}{key}{pad} ={pad} {literal(content[key])}{comment}")
        for key in order(tables):
            table(f"{name}.{key}" if name else key, content[key])

    table("", document)
    return "\n".join(lines) + "\n"


def test_the_quickstart_plan(quickstart):
    plan = build_plan(quickstart)
    resolved = plan.content.resolved
    assert resolved.samples_per_step == resolved.samples_per_update == 128
    assert (resolved.max_sequence_tokens, resolved.max_tokens_per_step) == (18, 2304)
    assert resolved.constant_length == 6
    assert resolved.bit_exact
    assert resolved.checkpoint_bytes == 12 * resolved.num_parameters
    assert [job.name for job in plan.content.jobs] == ["prepare", "engine-0", "engine-1", "trainer"]
    assert {job.module for job in plan.content.jobs} == {
        "miles_olmo.jobs.prepare",
        "miles_olmo.jobs.engine",
        "miles_olmo.jobs.trainer",
    }
    assert [job.name for job in plan.content.jobs if job.restartable] == ["engine-0", "engine-1"]
    assert {entry.kind for entry in plan.content.inputs} == {"produced"}
    assert plan.local.base_directory == str(quickstart.parent)


def test_a_plan_over_own_files_pins_their_bytes(own_data):
    path = own_data()
    plan = build_plan(path)
    entries = {entry.key: entry for entry in plan.content.inputs}
    assert set(entries) == {"data.train", "data.evaluation", "data.tokenizer"}
    assert all(
        entry.kind == "local" and len(entry.sha256 or "") == 64 for entry in entries.values()
    )
    assert entries["data.train"].num_bytes == path.with_name("train.jsonl").stat().st_size
    assert entries["data.train"].num_rows == 40
    assert plan.content.jobs[0].name == "engine-0"
    assert plan.input_path("data.train", Path("/run")) == path.with_name("train.jsonl").resolve()


def test_a_checkpoint_directory_is_pinned_by_its_files(edited, tmp_path):
    checkpoint = tmp_path / "start"
    (checkpoint / "below").mkdir(parents=True)
    (checkpoint / "complete.json").write_bytes(b"{}")
    (checkpoint / "below" / "a.bin").write_bytes(b"1234")
    path = edited(('dtype = "float32"', 'dtype = "float32"\ncheckpoint = "start"'))
    first = build_plan(path)
    entry = next(item for item in first.content.inputs if item.key == "model.checkpoint")
    assert entry.num_bytes == 6
    (checkpoint / "below" / "a.bin").write_bytes(b"1235")
    assert build_plan(path).digest != first.digest


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.randoms(use_true_random=False),
    pad=st.sampled_from(["", " ", "\t  "]),
    comment=st.sampled_from(["", " # why", "\n\n# note = 1"]),
    where=st.sampled_from(["a", "deeper/b"]),
)
def test_the_digest_ignores_key_order_blanks_comments_and_location(
    tmp_path, seed, pad, comment, where
):
    def shuffled(keys):
        return seed.sample(keys, len(keys))

    path = tmp_path / where / "other.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_toml(tomli.loads(TEXT), shuffled, pad, comment))
    assert build_plan(path).digest == build_plan(QUICKSTART).digest


def changed_value(value):
    """Another JSON value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, value[-1]] if value else [1]
    return f"{value}x" if isinstance(value, str) else 1


def dumped_values(value, path=()):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from dumped_values(inner, (*path, key))
    else:
        yield path, value


def test_the_digest_covers_every_value_of_the_content(quickstart):
    from miles_olmo.base.canonical import digest

    content = build_plan(quickstart).content.model_dump(mode="json")
    original = digest(content)
    seen = {original}
    manifest_keys = set()
    for path, value in dumped_values(content):
        table = content
        for key in path[:-1]:
            table = table[key]
        table[path[-1]] = changed_value(value)
        seen.add(digest(content))
        table[path[-1]] = value
        if path[0] == "manifest":
            manifest_keys.add(path[1:])
    num_values = sum(1 for _ in dumped_values(content))
    assert len(seen) == num_values + 1
    assert digest(content) == original
    absent = {("model", "checkpoint")}
    assert {key for key in all_keys() if key not in manifest_keys} <= absent


@pytest.mark.parametrize(
    "override",
    ["seed=1", "name='other'", "train.steps=301", "algorithm.clip.high=0.29", "launch.threads=2"],
)
def test_a_changed_value_changes_the_digest(quickstart, override):
    assert build_plan(quickstart, overrides=[override]).digest != build_plan(quickstart).digest


def test_writing_a_default_does_not_change_the_digest(quickstart):
    plan = build_plan(quickstart, overrides=["rollout.max_refills=3", "rollout.temperature=1"])
    assert plan.digest == build_plan(quickstart).digest


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_byte_of_any_input_changes_the_digest(own_data, data):
    path = own_data()
    original = build_plan(path).digest
    name = data.draw(st.sampled_from(["train.jsonl", "evaluation.jsonl"]))
    content = bytearray(path.with_name(name).read_bytes())
    digits = [at for at, byte in enumerate(content) if chr(byte).isdigit()]
    at = data.draw(st.sampled_from(digits))
    content[at] = ord("0") + (content[at] - ord("0") + 1) % 10
    path.with_name(name).write_bytes(content)
    assert build_plan(path).digest != original


def test_two_checkouts_agree(own_data, tmp_path):
    path = own_data()
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for name in ("run.toml", "train.jsonl", "evaluation.jsonl", "tokenizer.json"):
        shutil.copy(path.with_name(name), copy / name)
    assert build_plan(copy / "run.toml").digest == build_plan(path).digest


def test_a_link_to_a_manifest_has_its_files_beside_it(own_data, tmp_path):
    path = own_data()
    link = tmp_path / "below" / "linked.toml"
    link.parent.mkdir()
    for name in ("train.jsonl", "evaluation.jsonl", "tokenizer.json"):
        path.with_name(name).rename(link.with_name(name))
    link.symlink_to(path)
    plan = build_plan(link)
    assert plan.local.base_directory == str(link.parent)
    assert plan.local.manifest_path == str(link)


def test_the_code_version_covers_every_byte_of_the_package_and_not_its_place(tmp_path):
    package = tmp_path / "src" / "miles_olmo"
    shutil.copytree(Path(miles_olmo.__file__).parent, package)

    def version_of_copy():
        program = "from miles_olmo.plan.hashing import code_version as v; print(v().source_sha256)"
        environment = {**os.environ, "PYTHONPATH": str(package.parent)}
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    original = code_version().source_sha256
    assert version_of_copy() == original
    changed = package / "tasks" / "order.py"
    changed.write_text(changed.read_text().replace("group", "grOup", 1))
    edited_version = version_of_copy()
    assert edited_version != original
    changed.rename(package / "tasks" / "ordering.py")
    assert version_of_copy() not in (original, edited_version)
