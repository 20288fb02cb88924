"""What a resume may change."""

import pytest

from miles_olmo.base.errors import PlanError
from miles_olmo.manifest.fields import all_keys, walk_sections
from miles_olmo.plan.build import build_plan
from miles_olmo.plan.compare import (
    DECIDES,
    INPUT_DECIDES,
    check_resume,
    decides,
    state_differences,
)


def test_the_table_covers_every_key_and_nothing_else():
    keys = {".".join(path) for path in all_keys()}
    sections = {".".join(path) for path, _ in walk_sections() if path}
    for key in keys:
        assert decides(key) in ("state", "order", "sampling", "nothing")
    assert set(DECIDES) <= keys | sections


def test_the_table_knows_every_input(own_data, edited, tmp_path):
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "complete.json").write_text("{}")
    path = own_data(('dtype = "float32"', 'dtype = "float32"\ncheckpoint = "start"'))
    assert {entry.key for entry in build_plan(path).content.inputs} == set(INPUT_DECIDES)


def test_equal_plans_do_not_differ(quickstart):
    assert state_differences(build_plan(quickstart), build_plan(quickstart)) == ()


@pytest.mark.parametrize(
    ("override", "key", "what"),
    [
        ("seed=1", "seed", "order"),
        ("model.shape.num_layers=3", "model.shape.num_layers", "state"),
        ("data.shuffle=false", "data.shuffle", "order"),
        ("data.prepare.seed=1", "data.prepare.seed", "order"),
        ("warmup.batch_size=32", "warmup.batch_size", "state"),
        ("rollout.samples_per_prompt=4", "rollout.samples_per_prompt", "order"),
        ("rollout.temperature=0.9", "rollout.temperature", "sampling"),
        ("rollout.max_response_tokens=7", "rollout.max_response_tokens", "sampling"),
        ("algorithm.kl.coefficient=0.1", "algorithm.kl.coefficient", "state"),
    ],
)
def test_what_decides_state_order_or_sampling_refuses_a_resume(quickstart, override, key, what):
    old, new = build_plan(quickstart), build_plan(quickstart, overrides=[override])
    (difference,) = state_differences(old, new)
    assert (difference.key, difference.decides) == (key, what)
    with pytest.raises(PlanError, match=key) as caught:
        check_resume(old, new, accept_changes=True)
    assert (caught.value.code, caught.value.exit_code) == ("E144", 4)


@pytest.mark.parametrize(
    "override",
    ["train.steps=400", "train.optimizer.learning_rate=1e-4", "engines.count=1", "name='x'"],
)
def test_other_differences_need_to_be_accepted(quickstart, override):
    old, new = build_plan(quickstart), build_plan(quickstart, overrides=[override])
    with pytest.raises(PlanError) as caught:
        check_resume(old, new, accept_changes=False)
    assert (caught.value.code, caught.value.exit_code) == ("E145", 4)
    (difference,) = check_resume(old, new, accept_changes=True)
    assert difference.decides == "nothing"
    assert str(difference).startswith(override.split("=")[0])


def test_a_section_that_appears_is_a_difference(quickstart, edited):
    text = quickstart.read_text()
    start = text.index("[evaluation]")
    without = edited((text[start:], ""))
    keys = {item.key for item in state_differences(build_plan(without), build_plan(quickstart))}
    assert keys == {"evaluation.every_steps", "evaluation.num_prompts"}


def test_other_bytes_of_the_training_data_refuse_a_resume(own_data):
    path = own_data()
    old = build_plan(path)
    train = path.with_name("train.jsonl")
    train.write_text("".join(reversed(train.read_text().splitlines(keepends=True))))
    new = build_plan(path)
    assert [(d.key, d.decides) for d in state_differences(old, new)] == [
        ("input data.train", "order")
    ]


def test_other_code_must_be_accepted(quickstart):
    old = build_plan(quickstart)
    code = old.content.code.model_copy(update={"source_sha256": "0" * 64})
    new = old.model_copy(update={"content": old.content.model_copy(update={"code": code})})
    (difference,) = check_resume(old, new, accept_changes=True)
    assert (difference.key, difference.decides) == ("code", "nothing")
