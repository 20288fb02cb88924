"""Values that do not go together are refused, each with its own code, at the key that has to change."""

import pytest

from miles_olmo.base.codes import CODES
from miles_olmo.base.codes.plan import ENTRIES
from miles_olmo.manifest.reports import ManifestErrors
from miles_olmo.plan.build import build_plan

# code, text of the quickstart manifest, its replacement, start of the line that the report points at
MANIFEST_FAULTS = [
    ("E101", "\nhidden_size = 128", "\nhidden_size = 100", "hidden_size"),
    ("E101", "head_dim = 32", "head_dim = 30", "head_dim"),
    ("E101", "shared_expert_hidden_size = 128", "shared_expert_hidden_size = 12", "shared_expert"),
    ("E102", "num_key_value_heads = 4", "num_key_value_heads = 3", "num_key_value_heads"),
    ("E103", "num_experts = 8", "num_experts = 1", "num_experts_per_token"),
    ("E104", "[train.packing]", "[train.parallel]\ntensor = 2\n[train.packing]", "tensor"),
    ("E104", "[train.packing]", "[train.parallel]\npipeline = 2\n[train.packing]", "pipeline"),
    ("E104", "[train.packing]", "[train.parallel]\ncontext = 2\n[train.packing]", "context"),
    ("E105", "max_tokens = 1024", "max_tokens = 1024\npacks_per_microbatch = 2", "packs_per_micro"),
    ("E106", "count = 2", "count = 2\ntensor_parallel = 2", "tensor_parallel"),
    ("E107", "count = 2", 'count = 2\ncolocate = "offload"', "colocate"),
    ("E146", "[checkpoint]", '[launch]\ndevice = "cuda"\n[checkpoint]', 'kind = "core"'),
    ("E147", "count = 2", 'count = 2\ncolocate = "resident"', "colocate"),
    ("E108", "[train.packing]", "[train.parallel]\nexpert = 3\n[train.packing]", "expert = 3"),
    ("E108", "[train.packing]", "[train.parallel]\nexpert = 16\n[train.packing]", "expert = 16"),
    ("E110", "samples_per_prompt = 8", "samples_per_prompt = 1", "samples_per_prompt"),
    ("E111", "temperature = 1.0", "temperature = 1.0\ntop_p = 0.9", "top_p"),
    ("E111", "temperature = 1.0", "temperature = 1.0\ntop_k = 5", "top_k"),
    ("E112", "temperature = 1.0", "temperature = 0.0", "temperature"),
    ("E113", "steps = 300", "steps = 300\nupdates_per_step = 3", "updates_per_step"),
    ("E114", "max_tokens = 1024", "max_tokens = 17", "max_tokens"),
    ("E115", "max_response_tokens = 6", "max_response_tokens = 53", "max_prompt_tokens"),
    ("E117", "min_accuracy = 0.25", "min_accuracy = 0.5", "min_accuracy"),
    ("E118", "[algorithm.clip]", '[algorithm.kl]\nestimator = "k1"\n[algorithm.clip]', "estimator"),
    (
        "E118",
        "[algorithm.clip]",
        "[algorithm.importance_sampling]\ncap = 3\n[algorithm.clip]",
        "cap",
    ),
    ("E118", "[train.packing]", "[train.schedule]\nfinal_fraction = 0.1\n[train.packing]", "final"),
    (
        "E119",
        'aggregation = "token"',
        'aggregation = "token"\nconstant_length = 6',
        "constant_length",
    ),
    (
        "E120",
        "[train.packing]",
        "[train.z_loss]\ncoefficient = 0.1\n[train.packing]",
        "coefficient",
    ),
    ("E120", "[train.packing]", '[train.z_loss]\nmode = "global"\n[train.packing]', "mode"),
    ("E121", "[checkpoint]", "[publish]\nevery_steps = 4\n[checkpoint]", "every_steps = 50"),
    (
        "E122",
        "[train.packing]",
        "[train.schedule]\nramp_steps = 301\n[train.packing]",
        "ramp_steps",
    ),
    ("E123", 'dtype = "float32"', 'dtype = "float32"\ncheckpoint = "absent"', "checkpoint"),
    ("E126", "vocab_size = 48", "vocab_size = 40", "vocab_size"),
    ("E127", 'eos_token = "<eos>"', 'eos_token = "<end>"', "eos_token"),
    ("E127", 'bos_token = "<bos>"', 'bos_token = "<s>"', "bos_token"),
    ("E131", '["exact_match"]', '["exact_match", "exactmatch"]', "verifiers"),
    ("E134", "num_prompts = 256", "num_prompts = 257", "num_prompts"),
    ("E135", "digits = 4", "digits = 3", "num_train"),
    ("E135", "max_prompt_tokens = 12", "max_prompt_tokens = 9", "max_prompt_tokens"),
    ("E135", "max_response_tokens = 6", "max_response_tokens = 4", "max_response_tokens"),
    ("E136", 'train = "train.jsonl"', 'train = "../train.jsonl"', "train"),
    ("E136", 'train = "train.jsonl"', 'train = "evaluation.jsonl"', "evaluation"),
]
OWN_DATA_FAULTS = [
    ("E124", '"train.jsonl"', '"trian.jsonl"', "train"),
    ("E124", '"tokenizer.json"', '"."', "tokenizer"),
    ("E125", '"tokenizer.json"', '"train.jsonl"', "tokenizer"),
    ("E126", "vocab_size = 48", "vocab_size = 47", "vocab_size"),
    ("E127", 'eos_token = "<eos>"', 'eos_token = "<end>"', "eos_token"),
    (
        "E127",
        'eos_token = "<eos>"',
        'eos_token = "<eos>"\nchat_template = "chatml"',
        "chat_template",
    ),
    ("E133", "max_prompt_tokens = 12", "max_prompt_tokens = 3", "train"),
    ("E134", "num_prompts = 20", "num_prompts = 21", "num_prompts"),
]
# code, line that is put in place of line 3 of train.jsonl
ROW_FAULTS = [
    ("E128", '{"messages": '),
    ("E129", '{"messages": [{"role": "user", "content": "rev 1="}], "ground_truth": "1"}'),
    ("E130", '{"messages": "rev 1=", "ground_truth": "1", "dataset": "exact_match"}'),
    (
        "E130",
        '{"messages": [{"role": "user", "content": "1"}], "ground_truth": "É", "dataset": "exact_match"}',
    ),
    (
        "E131",
        '{"messages": [{"role": "user", "content": "1"}], "ground_truth": "1", "dataset": "exactmatch"}',
    ),
]
TESTED_ELSEWHERE = {
    "E109": "test_shapes_without_a_vllm_kernel_are_refused",
    "E116": "test_sections_that_measure_accuracy_need_evaluation_data",
    "E132": "test_a_verifier_that_the_reward_section_does_not_list_is_refused",
    "E137": "tests/tasks/test_prepare_data.py",
    "E140": "tests/plan/test_plan_files.py",
    "E141": "tests/plan/test_plan_files.py",
    "E142": "tests/plan/test_plan_files.py",
    "E143": "tests/plan/test_plan_files.py",
    "E144": "tests/plan/test_plan_compare.py",
    "E145": "tests/plan/test_plan_compare.py",
}


def problems_of(path):
    with pytest.raises(ManifestErrors) as caught:
        build_plan(path)
    assert caught.value.exit_code == 3
    return caught.value.problems


def check_single(path, code, start):
    codes = {problem.code for problem in problems_of(path)}
    assert codes == {code}
    problem = problems_of(path)[0]
    line = path.read_text().splitlines()[problem.line - 1]
    assert line[problem.column - 1 :].startswith(start)
    assert problem.what and problem.why and problem.fix


@pytest.mark.parametrize(("code", "old", "new", "start"), MANIFEST_FAULTS)
def test_each_impossible_combination_has_its_code_and_place(edited, code, old, new, start):
    check_single(edited((old, new)), code, start)


@pytest.mark.parametrize(("code", "old", "new", "start"), OWN_DATA_FAULTS)
def test_each_unusable_file_has_its_code_and_place(own_data, code, old, new, start):
    check_single(own_data((old, new)), code, start)


@pytest.mark.parametrize(("code", "row"), ROW_FAULTS)
def test_each_bad_data_line_is_named(own_data, code, row):
    path = own_data()
    train = path.with_name("train.jsonl")
    lines = train.read_text().splitlines()
    lines[2] = row
    train.write_text("\n".join(lines) + "\n")
    (problem,) = problems_of(path)
    assert (problem.file, problem.line, problem.code) == (str(train), 3, code)


def test_a_verifier_that_the_reward_section_does_not_list_is_refused(edited, own_data, monkeypatch):
    from miles_olmo.tasks import verifiers

    more = {**verifiers.VERIFIERS, "other": verifiers.exact_match}
    for module in (
        "tasks.verifiers",
        "plan.checks.objective",
        "plan.checks.inputs",
        "plan.checks.prepared",
    ):
        monkeypatch.setattr(f"miles_olmo.{module}.VERIFIERS", more)
    change = ('["exact_match"]', '["other"]')
    check_single(edited(change), "E132", "verifiers")
    problems = problems_of(own_data(change))
    assert {problem.code for problem in problems} == {"E132"}
    assert problems[0].line == 1


@pytest.mark.parametrize("section", ["[warmup]", "[evaluation]"])
def test_sections_that_measure_accuracy_need_evaluation_data(edited, section):
    path = edited(('evaluation = "evaluation.jsonl"\n', ""))
    problems = problems_of(path)
    lines = path.read_text().splitlines()
    assert section in {lines[p.line - 1].split(" ")[0] for p in problems}
    assert {problem.code for problem in problems} == {"E116"}


def test_every_code_of_the_range_is_tested():
    tested = {code for code, *_ in MANIFEST_FAULTS + OWN_DATA_FAULTS + ROW_FAULTS}
    assert {entry.code for entry in ENTRIES} == tested | set(TESTED_ELSEWHERE)


def test_every_code_is_explained_and_unique():
    assert all(code == entry.code for code, entry in CODES.items())
    assert all(e.title and e.cause and e.example and e.fix and e.exit_code for e in CODES.values())
    codes = [entry.code for entry in ENTRIES]
    assert codes == sorted(set(codes))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("samples_per_prompt = 8", "samples_per_prompt = 1"),
        ("steps = 300", "steps = 300\nupdates_per_step = 4"),
        ("max_tokens = 1024", "max_tokens = 18"),
        (
            "[algorithm.clip]",
            '[algorithm.kl]\ncoefficient = 0.1\nestimator = "k1"\n[algorithm.clip]',
        ),
        ("[train.packing]", '[train.z_loss]\nmode="global"\ncoefficient=0.1\n[train.packing]'),
        ("[checkpoint]", "[publish]\nevery_steps = 25\n[checkpoint]"),
    ],
)
def test_combinations_that_work_are_accepted(edited, old, new):
    changes = [(old, new)]
    if "samples_per_prompt" in old:
        off = '[algorithm.advantage]\nbaseline = "none"\nstd = "none"\n\n[algorithm.clip]'
        changes.append(("[algorithm.clip]", off))
    build_plan(edited(*changes))


@pytest.mark.parametrize(
    "changes",
    [
        [("head_dim = 32", "head_dim = 16")],
        [("expert_hidden_size = 128", "expert_hidden_size = 136")],
        [("hidden_size = 128", "hidden_size = 136")],
    ],
)
def test_shapes_without_a_vllm_kernel_are_refused(edited, changes):
    vllm = ('kind = "core"', 'kind = "vllm"')
    (problem,) = problems_of(edited(*changes, vllm))
    assert problem.code == "E109"
    assert changes[0][1].split()[0] in problem.what
    build_plan(edited(*changes))
    build_plan(edited(vllm))


def test_reading_and_checking_report_together(edited):
    path = edited(
        ("temperature", "tempreature"),
        ("hidden_size = 128", "hidden_size = 100"),
        ('kind = "core"', 'kind = "vllm"'),
        ("batch_size = 64", "batch_size = 0"),
    )
    assert [p.code for p in problems_of(path)] == ["E101", "E007", "E003", "E109"]


def test_a_check_that_depends_on_an_unreadable_key_says_nothing(edited):
    path = edited(("max_response_tokens = 6", "max_response_tokens = 6.5"))
    assert [p.code for p in problems_of(path)] == ["E005"]
    path = edited(
        ("num_evaluation = 256", "num_evaluaton = 256"), ("num_prompts = 256", "num_prompts = 999")
    )
    assert [p.code for p in problems_of(path)] == ["E003"]


def test_missing_files_get_suggestions(own_data):
    (problem,) = problems_of(own_data(('"train.jsonl"', '"trian.jsonl"')))
    assert problem.fix == "did you mean 'train.jsonl'?"


def test_a_misspelt_verifier_is_reported_once_and_not_for_every_row(edited, own_data):
    change = ('["exact_match"]', '["exactmatch"]')
    for path in (edited(change), own_data(change)):
        assert [p.code for p in problems_of(path)] == ["E131"]


def test_a_directory_without_a_complete_checkpoint_is_refused(edited, tmp_path):
    (tmp_path / "step-000080").mkdir()
    (tmp_path / "step-000080" / "weights.safetensors").write_bytes(b"")
    for written, words in (
        ("step-000080", "complete.json"),
        ("step-00080", "no directory"),
        ("", ""),
    ):
        path = edited(('dtype = "float32"', f'dtype = "float32"\ncheckpoint = "{written}"'))
        (problem,) = problems_of(path)
        assert problem.code == "E123"
        assert words in problem.why


def test_an_unknown_key_does_not_hide_what_is_wrong_with_the_files(own_data):
    path = own_data(('"train.jsonl"', '"trian.jsonl"\nzzz = 1'))
    assert [p.code for p in problems_of(path)] == ["E124", "E003"]


def test_prompts_over_the_limit_are_counted_in_the_plan(own_data):
    path = own_data()
    train = path.with_name("train.jsonl")
    long = train.read_text().splitlines()[0].replace("rev ", "rev 000000")
    train.write_text(train.read_text() + long + "\n")
    entry = build_plan(path).content.inputs[0]
    assert (entry.key, entry.num_rows, entry.num_too_long) == ("data.train", 41, 1)
