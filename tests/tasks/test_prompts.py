"""Reading data sets: what is accepted, what is refused, and how it is reported."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_olmo.base.errors import InputError
from miles_olmo.base.problems import Problem
from miles_olmo.manifest.models import Data
from miles_olmo.tasks import reversed_digits
from miles_olmo.tasks.prompts import answer_ids, read_prompts
from miles_olmo.tasks.rows import DataErrors, read_rows
from miles_olmo.tasks.tokenizer import TextTokenizer

DATA = Data(train="train.jsonl", tokenizer="tokenizer.json", bos_token="<bos>", eos_token="<eos>")
USER = {"role": "user", "content": "rev 1234="}
ROW = {"messages": [USER], "ground_truth": "4321", "dataset": "exact_match"}


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer(reversed_digits.build_tokenizer(), bos_token="<bos>", eos_token="<eos>")


def write_lines(tmp_path, *lines):
    path = tmp_path / "train.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_a_row_becomes_a_tokenised_prompt_with_bos_once(tmp_path, tokenizer):
    path = write_lines(tmp_path, ROW, {**ROW, "messages": [{**USER, "content": "<bos>rev 1="}]})
    prompts = read_prompts(path, tokenizer, DATA, max_prompt_tokens=12)
    first, second = prompts.prompts
    assert first.prompt_id == "train:1"
    assert tokenizer.decode(first.ids) == "<bos>rev 1234="
    assert first.text == "rev 1234="
    assert (first.ground_truth, first.verifier) == ("4321", "exact_match")
    assert tokenizer.decode(second.ids) == "<bos>rev 1="
    assert tokenizer.decode(answer_ids(first, tokenizer)) == "4321<eos>"


def test_a_trailing_assistant_message_is_dropped(tmp_path, tokenizer):
    answered = {**ROW, "messages": [USER, {"role": "assistant", "content": "4321"}]}
    prompts = read_prompts(write_lines(tmp_path, answered), tokenizer, DATA, max_prompt_tokens=12)
    assert prompts[0].text == "rev 1234="


def test_lists_of_one_and_capital_letters_name_the_same_verifier(tmp_path, tokenizer):
    listed = {**ROW, "ground_truth": ["4321"], "dataset": ["Exact_Match"], "extra": 1}
    prompts = read_prompts(write_lines(tmp_path, listed), tokenizer, DATA, max_prompt_tokens=12)
    assert (prompts[0].ground_truth, prompts[0].verifier) == ("4321", "exact_match")


def test_prompts_over_the_limit_are_left_out_and_counted(tmp_path, tokenizer):
    long = {**ROW, "messages": [{**USER, "content": "rev 123456789="}]}
    path = write_lines(tmp_path, long, ROW, "", long)
    prompts = read_prompts(path, tokenizer, DATA, max_prompt_tokens=10)
    assert [prompt.prompt_id for prompt in prompts.prompts] == ["train:2"]
    assert prompts.num_too_long == 2


def test_a_file_without_a_usable_prompt_is_an_error(tmp_path, tokenizer):
    with pytest.raises(InputError) as caught:
        read_prompts(write_lines(tmp_path, ROW), tokenizer, DATA, max_prompt_tokens=3)
    assert caught.value.code == "E133"


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("{not json", "E128", "not JSON"),
        ("[1, 2]", "E128", "not an object"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin1"), "E128", "not JSON"),
        ({"messages": [USER], "ground_truth": "1"}, "E129", "'dataset'"),
        ({"prompt": "x", "ground_truth": "1", "dataset": "d"}, "E129", "'messages'"),
        ({**ROW, "messages": "rev"}, "E130", "messages"),
        ({**ROW, "messages": [{"role": "user"}]}, "E130", "messages"),
        ({**ROW, "messages": []}, "E130", "no prompt"),
        ({**ROW, "ground_truth": 4321}, "E130", "ground_truth"),
        ({**ROW, "ground_truth": ["1", "2"]}, "E130", "2"),
        ({**ROW, "dataset": ["a", "b"], "ground_truth": ["1", "2"]}, "E130", "2 verifiers"),
        ({**ROW, "messages": [{**USER, "content": "rev Ü="}]}, "E130", "cannot encode"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_code(tmp_path, tokenizer, line, code, words):
    path = write_lines(tmp_path, ROW, line, ROW)
    with pytest.raises(DataErrors) as caught:
        read_prompts(path, tokenizer, DATA, max_prompt_tokens=12)
    (problem,) = caught.value.problems
    assert isinstance(caught.value, InputError)
    assert (problem.file, problem.line, problem.code) == (str(path), 2, code)
    assert words in problem.what and problem.why and problem.fix
    assert f"{path}:2:1: {code}" in str(caught.value)


def test_a_misspelt_column_gets_a_suggestion(tmp_path):
    misspelt = {"messages": [USER], "groundtruth": "4321", "dataset": "exact_match"}
    _, (problem,) = read_rows(write_lines(tmp_path, misspelt))
    assert problem.fix == "rename 'groundtruth' to 'ground_truth'"


def test_all_bad_lines_come_in_one_report_up_to_twenty(tmp_path, tokenizer):
    path = write_lines(tmp_path, *["{"] * 30, ROW)
    with pytest.raises(DataErrors) as caught:
        read_prompts(path, tokenizer, DATA, max_prompt_tokens=12)
    assert [problem.line for problem in caught.value.problems] == list(range(1, 21))
    assert "11 more lines" in caught.value.problems[-1].what


def test_control_characters_of_a_file_never_reach_the_terminal():
    problem = Problem("t.jsonl", 3, 1, "E131", "unknown verifier '\x1b[2J\nx'", "why\x07", "fix")
    assert problem.render() == ("t.jsonl:3:1: E131 unknown verifier '\\x1b[2J\\nx'; why\\x07; fix")


def test_a_missing_file_is_named(tmp_path, tokenizer):
    with pytest.raises(InputError, match=r"absent\.jsonl") as caught:
        read_prompts(tmp_path / "absent.jsonl", tokenizer, DATA, max_prompt_tokens=12)
    assert caught.value.code == "E124"


@given(raw=st.binary(max_size=80))
def test_no_line_is_read_with_anything_but_a_row_or_a_fault(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("lines") / "train.jsonl"
    path.write_bytes(raw)
    rows, problems = read_rows(path)
    assert len(rows) + len(problems) == sum(bool(line.strip()) for line in raw.split(b"\n"))
