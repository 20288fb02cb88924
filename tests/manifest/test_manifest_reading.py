"""Everything that is wrong with a manifest, at its place, in one report."""

import pytest

from miles_olmo.base.errors import UsageError
from miles_olmo.manifest.fields import all_keys, section_at
from miles_olmo.manifest.reading import read_leniently, read_manifest
from miles_olmo.manifest.reports import ManifestErrors
from miles_olmo.manifest.secrets import looks_secret


def problems_of(path, **options):
    with pytest.raises(ManifestErrors) as caught:
        read_manifest(path, **options)
    assert caught.value.exit_code == 3
    return caught.value.problems


def only_problem(path, **options):
    (problem,) = problems_of(path, **options)
    return problem


def test_a_valid_manifest_is_read_with_positions(quickstart):
    manifest, positions = read_manifest(quickstart)
    assert manifest.rollout.samples_per_prompt == 8
    place = positions.where(("rollout", "samples_per_prompt"))
    line = quickstart.read_text().splitlines()[place.line - 1]
    assert line.startswith("samples_per_prompt = 8")


@pytest.mark.parametrize(
    ("old", "new", "code", "what", "fix"),
    [
        ("temperature", "  tempreature", "E003", "unknown key 'tempreature'", "set 'temperature'"),
        ("[evaluation]", "[evaluatoin]", "E003", "unknown section 'evaluatoin'", "'evaluation'"),
        ("count = 2", "count = 2\nlow = 1", "E003", "unknown key 'low'", "[algorithm.clip]"),
        ("count = 2", "count = 2\nzzz = 1", "E003", "unknown key 'zzz'", "remove it"),
        ("prompts_per_step = 16\n", "", "E004", "missing key 'prompts_per_step'", "add"),
        ("steps = 300", 'steps = "300"', "E005", "the string '300'", "an integer"),
        ("count = 2", "count = true", "E005", "engines.count is true", "an integer"),
        ("count = 2", "count = 2.0", "E005", "engines.count is 2.0", "an integer"),
        ("temperature = 1.0", "temperature = []", "E005", "a list", "a number"),
        ('verifiers = ["exact_match"]', "verifiers = 3", "E005", "reward.verifiers", "a list"),
        ('kind = "core"', 'kind = "croe"', "E006", "'croe'", "did you mean 'core'?"),
        ('kind = "core"', 'kind = "zzz"', "E006", "'zzz'", "choose one of them"),
        ("version = 1", "version = 2", "E006", "version is 2", "set 1"),
        ("count = 2", "count = 0", "E007", "engines.count is 0", "at least 1"),
        ("low = 0.2", "low = nan", "E007", "clip.low is nan", ""),
        ("low = 0.2", "low = 1.5", "E007", "clip.low is 1.5", "at most 1"),
        (
            "[train.packing]",
            "[train.parallel]\ntimeout_seconds = 1e30\n[train.packing]",
            "E007",
            "timeout_seconds is 1e+30",
            "at most 604800",
        ),
        ("seed = 0", "seed = 9007199254740992", "E007", "more than 53 bits", "below"),
        ('name = "quickstart"', 'name = "Quick Start"', "E007", "'Quick Start'", "such a name"),
        (
            'verifiers = ["exact_match"]',
            "verifiers = []",
            "E007",
            "reward.verifiers has too few values",
            "add",
        ),
        ("learning_rate = 5e-4", "learning_rate = 5e-4\nbetas = [0.9]", "E007", "too few", "add"),
        ("count = 2", 'count = 2\napi_key = "hush"', "E008", "'api_key'", "environment"),
        ("count = 2", 'count = 2\nHF_TOKEN = "hush"', "E008", "'HF_TOKEN'", "environment"),
    ],
)
def test_each_mistake_has_its_code_place_and_remedy(edited, old, new, code, what, fix):
    path = edited((old, new))
    problem = only_problem(path)
    assert problem.code == code
    assert what in problem.what
    assert problem.why
    assert fix in problem.fix
    assert "hush" not in problem.render()
    line = path.read_text().splitlines()[problem.line - 1]
    if code != "E004":
        assert line[problem.column - 1 :].split()[0].strip("[]") in new


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("version = 1\nname = \n", 2, 8, "Invalid value"),
        ("version = 1\nversion = 1\n", 2, 12, "overwrite"),
        ("[train\n", 1, 7, "Expected"),
        ("seed = 1" + "0" * 5000, 1, 1, "digits"),
        ("seed = " + "[" * 5000, 1, 1, "nest"),
    ],
)
def test_a_syntax_error_has_line_and_column(tmp_path, text, line, column, words):
    path = tmp_path / "run.toml"
    path.write_text(text)
    problem = only_problem(path)
    assert (problem.code, problem.line, problem.column) == ("E001", line, column)
    assert words in problem.why


def test_a_missing_file_gets_a_suggestion(quickstart):
    problem = only_problem(quickstart.with_name("quickstrat.toml"))
    assert problem.code == "E002"
    assert str(quickstart) in problem.fix


@pytest.mark.parametrize("content", [b"name = '\xff'", None])
def test_what_is_not_a_text_file_is_refused(tmp_path, content):
    path = tmp_path / "run.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    assert only_problem(path).code == "E002"


def test_all_problems_come_at_once_in_the_order_of_their_places(edited):
    path = edited(
        ("[rollout]", "[rolout]"),
        ("temperature", "tempreature"),
        ("batch_size = 64", "batch_size = 0"),
        ("steps = 300", "steps = '300'"),
        ('tokenizer = "tokenizer.json"\n', ""),
    )
    problems = problems_of(path)
    assert [problem.code for problem in problems] == ["E004", "E007", "E003", "E003", "E005"]
    places = [(problem.line, problem.column) for problem in problems]
    assert places == sorted(places)


def test_a_missing_key_points_at_its_table(edited):
    path = edited(("steps = 300\n", ""))
    problem = only_problem(path)
    assert path.read_text().splitlines()[problem.line - 1] == "[train]"


def test_a_missing_section_is_called_a_section(edited):
    path = edited(("[train.packing]\nmax_tokens = 1024\n", ""))
    assert only_problem(path).what == "missing section [train.packing]"


def test_an_empty_manifest_lacks_everything(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("")
    names = [problem.what for problem in problems_of(path)]
    assert len(names) == 7


def test_problems_have_the_documented_form(edited):
    path = edited(("temperature", "    tempreature"))
    with pytest.raises(ManifestErrors) as caught:
        read_manifest(path)
    problem = caught.value.problems[0]
    assert str(caught.value).splitlines()[0] == (
        f"{path}:{problem.line}:5: E003 unknown key 'tempreature'; [rollout] has no such key; "
        "set 'temperature'"
    )
    assert "\x1b[" not in str(caught.value)
    assert "\x1b[31mE003\x1b[0m" in caught.value.report(color=True)


def test_overrides_replace_keys_and_are_checked_like_the_file(quickstart):
    manifest, _ = read_manifest(
        quickstart, overrides=["train.steps = 20", 'name="other"', "evaluation={every_steps=5}"]
    )
    assert (manifest.train.steps, manifest.name) == (20, "other")
    assert manifest.evaluation is not None
    assert (manifest.evaluation.every_steps, manifest.evaluation.num_prompts) == (5, 256)
    problem = only_problem(quickstart, overrides=["train.steps=20", "train.stesp=1"])
    assert (problem.file, problem.line, problem.code) == ("--set", 2, "E003")


@pytest.mark.parametrize("override", ["train.steps", "name=other", "", "# nothing", "api_key=hush"])
def test_an_override_that_is_no_assignment_is_a_usage_error(quickstart, override):
    with pytest.raises(UsageError) as caught:
        read_manifest(quickstart, overrides=[override])
    assert (caught.value.code, caught.value.exit_code) == ("E602", 2)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.steps=20", "train.steps=30"],
        ["train.optimizer.betas=[0.9, 0.9]", "train.optimizer.betas=[0.8, 0.9]"],
        ["train.optimizer={learning_rate=1e-3}", "train.optimizer.learning_rate=1e-4"],
    ],
)
def test_a_key_that_is_set_twice_is_a_usage_error(quickstart, overrides):
    with pytest.raises(UsageError, match="E612"):
        read_manifest(quickstart, overrides=overrides)
    assert read_manifest(quickstart, overrides=[overrides[0], "name='other'"])[0].name == "other"


def test_what_is_readable_is_returned_beside_the_problems(edited):
    reading = read_leniently(edited(("count = 2", "count = 0"), ("low = 0.2", "lwo = 0.2")))
    assert reading.manifest is not None
    assert reading.manifest.engines.count == 1
    assert ("engines", "count") in reading.wrong
    assert ("algorithm", "clip", "low") in reading.wrong


def test_windows_line_ends_and_a_byte_order_mark_are_accepted(tmp_path, quickstart):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + quickstart.read_bytes().replace(b"\n", b"\r\n"))
    assert read_manifest(path)[0] == read_manifest(quickstart)[0]


def test_the_value_of_a_secret_of_the_environment_is_refused(edited, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-5417")
    monkeypatch.setenv("SHORT_TOKEN", "train")
    problem = only_problem(edited(('train = "train.jsonl"', 'train = "x/canary-5417.jsonl"')))
    assert (problem.code, problem.line) == ("E008", 29)
    assert "WANDB_API_KEY" in problem.what
    assert "canary" not in problem.render()


@pytest.mark.parametrize("name", ["api_key", "HF_TOKEN", "password", "clientSecret", "tokens"])
def test_names_of_secrets_are_recognised(name):
    assert looks_secret(name)


def test_no_key_of_the_manifest_counts_as_a_secret():
    assert not any(looks_secret(path[-1]) for path in all_keys())
    assert section_at(("train", "optimizer")) is not None
    assert section_at(("train", "steps")) is None
