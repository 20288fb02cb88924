"""A plan file is used only as it was made."""

import json

import pytest

from miles_olmo.base.errors import PlanError, UsageError
from miles_olmo.plan.build import build_plan
from miles_olmo.plan.model import CodeVersion, content_digest
from miles_olmo.plan.read import check_plan, read_plan, write_plan


@pytest.fixture
def written(quickstart, tmp_path):
    plan = build_plan(quickstart)
    path = tmp_path / "q.plan.json"
    write_plan(plan, path)
    return plan, path


def error_of(call, *arguments):
    with pytest.raises(PlanError) as caught:
        call(*arguments)
    assert caught.value.exit_code == 4
    return caught.value


def test_a_plan_survives_the_round_trip(written):
    plan, path = written
    assert read_plan(path, plan.digest) == plan
    check_plan(plan)


def test_an_edited_plan_is_refused(written):
    _, path = written
    document = json.loads(path.read_text())
    document["content"]["manifest"]["train"]["steps"] = 301
    path.write_text(json.dumps(document))
    error = error_of(read_plan, path)
    assert error.code == "E141"
    assert error.details["actual"] != error.details["stated"]


def test_another_plan_than_expected_is_refused(written):
    _, path = written
    assert error_of(read_plan, path, "0" * 64).code == "E141"


def test_local_facts_may_differ(written):
    plan, path = written
    document = json.loads(path.read_text())
    document["local"]["base_directory"] = "/elsewhere"
    path.write_text(json.dumps(document, indent=None, sort_keys=True))
    assert read_plan(path, plan.digest).content == plan.content


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"digest": 1}', None])
def test_what_is_not_a_plan_is_refused(tmp_path, content):
    path = tmp_path / "x.plan.json"
    if content is not None:
        path.write_text(content)
    assert error_of(read_plan, path).code == "E140"


def test_a_plan_of_another_schema_is_refused(written):
    _, path = written
    path.write_text(path.read_text().replace("miles-olmo/plan/v1", "miles-olmo/plan/v9"))
    assert "schema_id" in error_of(read_plan, path).why


def test_changed_inputs_are_named_before_a_launch(own_data):
    path = own_data()
    plan = build_plan(path)
    check_plan(plan)
    train, tokenizer = path.with_name("train.jsonl"), path.with_name("tokenizer.json")
    train.write_text(train.read_text() + "\n")
    tokenizer.unlink()
    error = error_of(check_plan, plan)
    assert error.code == "E142"
    assert "data.train = 'train.jsonl'" in error.what
    assert "data.tokenizer = 'tokenizer.json' (cannot be read)" in error.what
    assert "evaluation" not in error.what


def test_a_plan_of_other_code_is_refused(written):
    plan, _ = written
    other = CodeVersion(version="0.0.9", source_sha256="0" * 64)
    content = plan.content.model_copy(update={"code": other})
    changed = plan.model_copy(update={"content": content, "digest": content_digest(content)})
    error = error_of(check_plan, changed)
    assert error.code == "E143"
    assert "0.0.9" in error.what


def test_a_place_that_cannot_be_written_is_a_usage_error(written, tmp_path):
    plan, path = written
    with pytest.raises(UsageError) as caught:
        write_plan(plan, path / "below" / "a.file")
    assert caught.value.code == "E604"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["q.plan.json"]
