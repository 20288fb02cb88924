"""Whatever a manifest holds: a clear refusal or a plan, never a traceback, never an ignored key."""

import json
import random
import sys
from pathlib import Path

import pytest
import tomli

from miles_olmo.base.codes import CODES
from miles_olmo.cli.main import main
from miles_olmo.manifest.fields import all_keys, walk_sections

QUICKSTART = Path(__file__).parents[2] / "manifests" / "quickstart.toml"
TEXT = QUICKSTART.read_text()
NUM_MUTATIONS = 1200
LITERALS = [
    "0", "-1", "1", "3", "1e400", "nan", "-inf", "9223372036854775808", "true", '""', '"x"', "[]",
    "{}", '["exact_match", 1]', "[0.9, 0.95, 0.99]", "1979-05-27", '"\\u0000"', "0.5", "1_000",
    '"../../etc/passwd"', "{ a = 1 }", "99999999999999999999999999999999999999999999999999999",
]  # fmt: skip
KNOWN = {".".join(path) for path in all_keys()}
SECTIONS = {".".join(path) for path, _ in walk_sections()}


def run_validate(path, monkeypatch, capsys):
    """The command in this process: exit code and the problems it reports."""
    monkeypatch.setattr(sys, "argv", ["miles", "validate", str(path), "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    output = capsys.readouterr()
    assert "Traceback" not in output.err, output.err
    document = json.loads(output.out)
    return end.value.code, document.get("errors", [])


def written_keys(value, path=""):
    for key, inner in value.items():
        name = f"{path}.{key}" if path else key
        if isinstance(inner, dict):
            yield from written_keys(inner, name)
            yield name
        else:
            yield name


def mutate(rng):
    """The quickstart manifest with one to three things wrong, or at least different."""
    text = TEXT
    for _ in range(rng.randint(1, 3)):
        text = rng.choice(MUTATIONS)(text, rng)
    return text


def change_character(text, rng):
    at = rng.randrange(len(text))
    return text[:at] + rng.choice("x=[]{}\"'#.\n\\0-é\x00 ") + text[at + 1 :]


def cut(text, rng):
    at = rng.randrange(len(text))
    return text[:at] + text[at + rng.randint(1, 40) :]


def drop_line(text, rng):
    lines = text.splitlines()
    del lines[rng.randrange(len(lines))]
    return "\n".join(lines)


def repeat_line(text, rng):
    lines = text.splitlines()
    lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    return "\n".join(lines)


def change_value(text, rng):
    lines = text.splitlines()
    at = rng.choice([i for i, line in enumerate(lines) if " = " in line])
    lines[at] = lines[at].split(" = ")[0] + " = " + rng.choice(LITERALS)
    return "\n".join(lines)


def misspell_key(text, rng):
    lines = text.splitlines()
    at = rng.choice([i for i, line in enumerate(lines) if line[:1].isalpha() or line[:1] == "["])
    where = rng.randrange(1, max(2, len(lines[at].split(" ")[0])))
    lines[at] = lines[at][:where] + rng.choice("abz_") + lines[at][where:]
    return "\n".join(lines)


def add_key(text, rng):
    lines = text.splitlines()
    name = rng.choice([*sorted(KNOWN), "zzz", "api_key"]).rsplit(".", 1)[-1]
    lines.insert(rng.randrange(len(lines)), f"{name} = {rng.choice(LITERALS)}")
    return "\n".join(lines)


MUTATIONS = [change_character, cut, drop_line, repeat_line, change_value, misspell_key, add_key]


def test_no_mutation_of_a_manifest_is_misread(tmp_path, monkeypatch, capsys):
    rng = random.Random(20)
    accepted, codes = 0, set()
    for _ in range(NUM_MUTATIONS):
        text = mutate(rng)
        path = tmp_path / "run.toml"
        path.write_text(text)
        code, errors = run_validate(path, monkeypatch, capsys)
        if code == 0:
            accepted += 1
            assert set(written_keys(tomli.loads(text))) <= KNOWN | SECTIONS
            continue
        assert code == 3, (code, errors, text)
        assert errors
        for error in errors:
            assert error["code"] in CODES and error["what"] and error["why"] and error["fix"]
            assert error["line"] >= 1 and error["column"] >= 1
        codes |= {error["code"] for error in errors}
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    assert 10 < accepted < NUM_MUTATIONS / 2
    assert {"E001", "E003", "E004", "E005", "E006", "E007", "E008"} <= codes


@pytest.mark.parametrize(
    ("code", "old", "new"),
    [
        ("E001", "[model]", "[model"),
        ("E003", "temperature = 1.0", "tempreature = 1.0"),
        ("E005", "steps = 300", 'steps = "300"'),
        ("E124", '"train.jsonl"', '"absent.jsonl"'),
        ("E126", "vocab_size = 48", "vocab_size = 20"),
        ("E131", '["exact_match"]', '["exact_matches"]'),
        ("E110", "samples_per_prompt = 8", "samples_per_prompt = 1"),
        ("E133", "max_prompt_tokens = 12", "max_prompt_tokens = 2"),
        ("E107", "count = 2", 'count = 2\ncolocate = "offload"'),
        ("E106", "count = 2", "count = 2\ntensor_parallel = 2"),
        ("E105", "max_tokens = 1024", "max_tokens = 1024\npacks_per_microbatch = 2"),
    ],
)
def test_bad_input_ends_with_its_code_and_changes_nothing(
    own_data, tmp_path, monkeypatch, capsys, code, old, new
):
    path = own_data((old, new))
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    exit_code, errors = run_validate(path, monkeypatch, capsys)
    assert exit_code == 3
    assert code in {error["code"] for error in errors}
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("code", "line"),
    [("E128", "{not json"), ("E129", '{"messages": [], "dataset": "exact_match"}')],
)
def test_a_bad_data_line_is_named_with_file_and_line(own_data, monkeypatch, capsys, code, line):
    path = own_data()
    train = path.with_name("train.jsonl")
    train.write_text(train.read_text() + line + "\n")
    exit_code, errors = run_validate(path, monkeypatch, capsys)
    assert exit_code == 3
    assert [(e["code"], e["file"], e["line"]) for e in errors] == [(code, str(train), 41)]
