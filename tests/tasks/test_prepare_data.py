"""The generated data set."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.base.canonical import file_sha256
from miles_olmo.base.errors import InputError
from miles_olmo.manifest.models import Data, PrepareData
from miles_olmo.tasks.prepare import RECORD_NAME, prepare_data
from miles_olmo.tasks.prompts import read_prompts
from miles_olmo.tasks.reversed_digits import data_files
from miles_olmo.tasks.tokenizer import TextTokenizer


def make_data(**parameters) -> Data:
    spec = {"task": "reversed_digits", "num_train": 60, "num_evaluation": 20, **parameters}
    return Data(
        train="train.jsonl",
        evaluation="evaluation.jsonl",
        tokenizer="tokenizer.json",
        bos_token="<bos>",
        eos_token="<eos>",
        prepare=PrepareData(**spec),
    )


def test_the_files_are_a_data_set_that_can_be_trained_on(tmp_path):
    data = make_data()
    hashes = prepare_data(data, tmp_path)
    tokenizer = TextTokenizer.from_data(tmp_path / data.tokenizer, data)
    for key, name, rows in [
        ("data.train", data.train, 60),
        ("data.evaluation", data.evaluation, 20),
    ]:
        prompts = read_prompts(tmp_path / name, tokenizer, data, max_prompt_tokens=10)
        assert (len(prompts), prompts.num_too_long) == (rows, 0)
        assert all(p.text == f"rev {p.ground_truth[::-1]}=" for p in prompts.prompts)
        assert hashes[key] == file_sha256(tmp_path / name)
    assert hashes["data.tokenizer"] == file_sha256(tmp_path / data.tokenizer)


@settings(max_examples=30, deadline=None)
@given(
    digits=st.integers(1, 6),
    num_train=st.integers(1, 7),
    num_evaluation=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_no_question_is_repeated_and_training_is_disjoint_from_evaluation(
    digits, num_train, num_evaluation, seed
):
    spec = PrepareData(
        task="reversed_digits",
        digits=digits,
        num_train=num_train,
        num_evaluation=num_evaluation,
        seed=seed,
    )
    train, evaluation = (content.splitlines() for content in data_files(spec))
    assert (len(train), len(evaluation)) == (num_train, num_evaluation)
    assert len({*train, *evaluation}) == num_train + num_evaluation
    assert data_files(spec) == data_files(spec)


def test_every_number_can_be_used():
    spec = PrepareData(task="reversed_digits", digits=2, num_train=90, num_evaluation=10)
    train, evaluation = data_files(spec)
    assert len(set((train + evaluation).splitlines())) == 100


def test_more_rows_than_numbers_are_refused():
    with pytest.raises(ValueError):
        data_files(PrepareData(task="reversed_digits", digits=1, num_train=8, num_evaluation=3))


def test_equal_parameters_give_equal_bytes_and_other_seeds_give_others(tmp_path):
    first = prepare_data(make_data(), tmp_path / "a")
    assert prepare_data(make_data(), tmp_path / "b") == first
    for name in ("train.jsonl", "evaluation.jsonl", "tokenizer.json", RECORD_NAME):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    other = prepare_data(make_data(seed=1), tmp_path / "c")
    assert other["data.train"] != first["data.train"]
    assert other["data.tokenizer"] == first["data.tokenizer"]


def test_intact_files_are_kept_and_damaged_ones_are_made_again(tmp_path):
    hashes = prepare_data(make_data(), tmp_path)
    stamp = (tmp_path / "train.jsonl").stat().st_mtime_ns
    assert prepare_data(make_data(), tmp_path) == hashes
    assert (tmp_path / "train.jsonl").stat().st_mtime_ns == stamp
    (tmp_path / "train.jsonl").write_text("torn")
    assert prepare_data(make_data(), tmp_path) == hashes
    assert file_sha256(tmp_path / "train.jsonl") == hashes["data.train"]


def test_an_interrupted_preparation_is_completed(tmp_path):
    hashes = prepare_data(make_data(), tmp_path)
    (tmp_path / RECORD_NAME).unlink()
    (tmp_path / "evaluation.jsonl").unlink()
    assert prepare_data(make_data(), tmp_path) == hashes


def test_the_users_own_file_is_never_overwritten(tmp_path):
    (tmp_path / "train.jsonl").write_text("mine\n")
    with pytest.raises(InputError, match=r"train\.jsonl is already there") as caught:
        prepare_data(make_data(), tmp_path)
    assert caught.value.code == "E137"
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]
    assert (tmp_path / "train.jsonl").read_text() == "mine\n"


def test_the_record_says_what_the_files_are(tmp_path):
    hashes = prepare_data(make_data(), tmp_path)
    record = json.loads((tmp_path / RECORD_NAME).read_text())
    assert record["parameters"]["num_train"] == 60
    assert {key: entry["sha256"] for key, entry in record["files"].items()} == hashes
