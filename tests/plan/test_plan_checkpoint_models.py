"""[model] from the checkpoint it starts from, and shapes that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_olmo.api.planning import load_manifest, make_plan, write_plan
from miles_olmo.manifest.models import ModelShape
from miles_olmo.manifest.reports import ManifestErrors
from miles_olmo.tasks import reversed_digits
from tests.conftest import QUICKSTART
from tests.model_zoo import MORE, PUBLISHED_OLMOE, ZOO

SHAPE_START, SHAPE_END = "[model.shape]", "[data]"
FAMILY = 'family = "olmo3moe"\n'
DTYPE = 'dtype = "float32"\n'


def write_hugging_face(directory: Path, config: dict, *, shards: int = 1) -> None:
    """A directory that looks whole to a plan; nobody reads its weights here."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    for name in names if shards > 1 else ["model.safetensors"]:
        (directory / name).write_bytes(b"weights")
    if shards > 1:
        index = {"weight_map": {f"t{i}": name for i, name in enumerate(names)}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def manifest(own_data, tmp_path):
    """Write a manifest that starts from `hf`, with these lines in place of [model]'s."""

    def write(config: dict | None = None, table: str = "", shards: int = 1) -> Path:
        path = own_data()
        text = path.read_text()
        start, end = text.index("[model]"), text.index(SHAPE_END)
        path.write_text(f'{text[:start]}[model]\ncheckpoint = "hf"\n{table}\n{text[end:]}')
        if config is not None:
            write_hugging_face(tmp_path / "hf", config, shards=shards)
        return path

    return write


def config_of(name: str, **changes) -> dict:
    from miles_olmo.manifest.hugging_face import write_hugging_face as written

    model = {**ZOO, **MORE}[name]
    return {**written(model), "model_type": model.family, "dtype": "float32", **changes}


def problems(path: Path) -> list:
    with pytest.raises(ManifestErrors) as caught:
        make_plan(path)
    return caught.value.problems


@pytest.mark.parametrize("name", {**ZOO, **MORE})
def test_the_whole_model_table_is_filled_in_and_recorded(manifest, name):
    path = manifest(config_of(name))
    plan = make_plan(path)
    expected = {**ZOO, **MORE}[name]
    assert plan.manifest.model.family == expected.family
    assert plan.manifest.model.shape.windows == expected.shape.windows
    same = {"layer_types": expected.shape.layer_types}
    assert plan.manifest.model.shape.model_copy(update=same) == expected.shape
    assert load_manifest(path).model == plan.manifest.model
    entry = next(item for item in plan.content.inputs if item.key == "model.checkpoint")
    assert entry.kind == "local" and entry.sha256


def test_the_dtype_is_that_of_the_files_unless_it_is_written(manifest):
    path = manifest({**PUBLISHED_OLMOE})
    assert make_plan(path).manifest.model.dtype == "bfloat16"
    path.write_text(path.read_text().replace("[model]", '[model]\ndtype = "float32"'))
    assert make_plan(path).manifest.model.dtype == "float32"


def test_a_key_that_says_the_same_may_be_written(manifest):
    table = '[model.shape]\nnum_layers = 4\nlayer_types = ["sliding_attention", "full_attention"]'
    path = manifest(config_of("everything"), table)
    assert make_plan(path).manifest.model.shape.num_layers == 4


@pytest.mark.parametrize(
    ("table", "texts"),
    [
        ("[model.shape]\nnum_layers = 5", ("num_layers = 5", "num_hidden_layers = 4")),
        ('[model.shape]\nrouter = "softmax"', ("'softmax'", "gating_function = 'sigmoid'")),
        ("[model.shape]\nembed_norm = false", ("embed_norm = false", "embed_norm = true")),
        (
            '[model.shape]\nlayer_types = ["full_attention", "sliding_attention"]',
            ("layer_types = ['full_attention', 'sliding_attention']",),
        ),
        ('family = "olmoe"', ("family = 'olmoe'", "'olmo3moe' in hf/config.json")),
    ],
)
def test_a_key_that_contradicts_is_refused_with_both_values(manifest, table, texts):
    found = problems(manifest(config_of("everything"), table))
    assert [problem.code for problem in found] == ["E172"]
    assert all(text in found[0].what for text in texts), found[0].what
    assert found[0].line > 1


@pytest.mark.parametrize(
    ("config", "code", "text"),
    [
        ({"model_type": "olmo3"}, "E170", "'olmo3'"),
        ({"model_type": "olmo2_moe"}, "E170", "families are olmo3moe, olmoe"),
        ({}, "E170", "None"),
        ({**PUBLISHED_OLMOE, "architectures": ["OlmoeModel"]}, "E170", "OlmoeModel"),
        ({**PUBLISHED_OLMOE, "clip_qkv": 8.0}, "E171", "clip_qkv = 8.0"),
        ({**PUBLISHED_OLMOE, "torch_dtype": "float16"}, "E172", "float16"),
        ({**PUBLISHED_OLMOE, "num_attention_heads": 0}, "E173", "wrong type"),
        ({**PUBLISHED_OLMOE, "rope_scaling": [1]}, "E173", "wrong type"),
        ({**PUBLISHED_OLMOE, "intermediate_size": 1020}, "E101", "multiple of 8"),
    ],
)
def test_a_checkpoint_that_cannot_be_trained_is_refused_by_name(manifest, config, code, text):
    found = problems(manifest(config))
    assert code in [problem.code for problem in found]
    assert any(text in str(problem) for problem in found), found
    assert not any("model.shape" in problem.what and "missing" in problem.what for problem in found)


def test_a_description_that_is_no_json_is_refused(manifest, tmp_path):
    path = manifest(PUBLISHED_OLMOE)
    (tmp_path / "hf/config.json").write_text("<html>")
    assert [problem.code for problem in problems(path)] == ["E173"]


@pytest.mark.parametrize(
    "gone", ["model-00002-of-00003.safetensors", "model.safetensors.index.json"]
)
def test_missing_weight_files_are_named(manifest, tmp_path, gone):
    path = manifest(PUBLISHED_OLMOE, shards=3)
    make_plan(path)
    (tmp_path / "hf" / gone).unlink()
    (found,) = problems(path)
    assert found.code == "E174" and gone in found.why


def test_without_a_checkpoint_the_shape_is_still_required(manifest):
    path = manifest()
    assert any("shape" in problem.what for problem in problems(path))


BAD_SHAPES = [
    ("dense_layers_indices = [0]", "E175"),
    ("dense_hidden_size = 64", "E175"),
    ("dense_layers_indices = [1, 0]\ndense_hidden_size = 64", "E175"),
    ("dense_layers_indices = [2]\ndense_hidden_size = 64", "E175"),
    ("dense_layers_indices = [0, 1]\ndense_hidden_size = 64", "E175"),
    ("dense_layers_indices = [0]\ndense_hidden_size = 60", "E101"),
    ("sliding_window = 8", "E176"),
    ('layer_types = ["sliding_attention"]', "E176"),
    (
        'sliding_window = 8\nlayer_types = ["sliding_attention", "full_attention", "full_attention"]',
        "E176",
    ),
]


@pytest.mark.parametrize(("lines", "code"), BAD_SHAPES)
def test_shapes_that_cannot_be_are_refused(edited, lines, code):
    path = edited(("initializer_std = 0.08", f"initializer_std = 0.08\n{lines}"))
    assert code in [problem.code for problem in problems(path)]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("", "", "shared_expert_hidden_size = 128"),
        ('router = "softmax"', 'router = "sigmoid"', "router = 'sigmoid'"),
        ("head_dim = 32", "head_dim = 64", "head_dim = 64"),
        ("initializer_std", "use_peri_ln = true\ninitializer_std", "use_peri_ln = true"),
        ("initializer_std", "embed_scale = 2.0\ninitializer_std", "embed_scale = 2.0"),
    ],
)
def test_olmoe_refuses_by_name_what_its_class_cannot_hold(edited, old, new, named):
    changes = [(FAMILY, 'family = "olmoe"\n')] + ([(old, new)] if old else [])
    found = problems(edited(*changes))
    assert {problem.code for problem in found} == {"E177"}
    assert any(named in problem.what for problem in found), found


# Checkpoints of a run: they have the model of the run's plan.


@pytest.fixture
def from_a_run(manifest, tmp_path):
    """Write a manifest that starts from a checkpoint of a run of the quickstart, with this [model]."""
    run = tmp_path / "runs/first-1"
    (run / "checkpoints/step-000010").mkdir(parents=True)
    (run / "checkpoints/step-000010/complete.json").write_text("{}")
    write_plan(make_plan(QUICKSTART), run / "plan.json")

    def write(table: str = "", checkpoint: str = "runs/first-1/checkpoints/step-000010") -> Path:
        path = manifest(table=table)
        path.write_text(path.read_text().replace('"hf"', f'"{checkpoint}"'))
        return path

    return write


def other_value(value):
    """Another value of the same type, and in range for [model.shape]."""
    others = {
        **{"softmax": "sigmoid", None: 2, "olmo3moe": "olmoe", "float32": "bfloat16"},
        **{True: False, False: True},
    }
    if isinstance(value, bool | str) or value is None:
        return others[value]
    return ["sliding_attention"] if isinstance(value, list) else value + 1


def shape_of_the_quickstart() -> dict:
    return make_plan(QUICKSTART).manifest.model.shape.model_dump(mode="json")


def test_a_checkpoint_of_a_run_fills_the_model_in(from_a_run, tmp_path):
    model = make_plan(from_a_run()).manifest.model
    expected = make_plan(QUICKSTART).manifest.model
    assert model.model_copy(update={"checkpoint": None}) == expected
    (tmp_path / "link").symlink_to(tmp_path / "runs/first-1/checkpoints/step-000010")
    assert make_plan(from_a_run(checkpoint="link")).manifest.model.shape == expected.shape


@pytest.mark.parametrize("key", [*ModelShape.model_fields, "family", "dtype"])
def test_no_key_may_contradict_the_run_that_a_checkpoint_is_of(from_a_run, key):
    present = {**shape_of_the_quickstart(), "family": "olmo3moe", "dtype": "float32"}[key]
    value = "headwise" if key == "attention_gate_type" else other_value(present)
    line = f"{key} = {json.dumps(value)}"
    table = line if key in ("family", "dtype") else f"[model.shape]\n{line}"
    found = [p for p in problems(from_a_run(table)) if p.code == "E172"]
    (problem,) = found
    assert problem.what.startswith(f"{key} = ") and "first-1/plan.json" in problem.what


def test_the_same_values_may_be_written(from_a_run):
    lines = [
        f"{key} = {json.dumps(value)}"
        for key, value in shape_of_the_quickstart().items()
        if value is not None
    ]
    bare = make_plan(from_a_run()).manifest.model
    written = from_a_run("\n".join(['family = "olmo3moe"', "[model.shape]", *lines]))
    assert make_plan(written).manifest.model == bare


@pytest.mark.parametrize("text", ["{", "[]", '{"content": {"manifest": {"model": {}}}}'])
def test_a_plan_of_the_run_that_cannot_be_read_is_named(from_a_run, tmp_path, text):
    path = from_a_run()
    (tmp_path / "runs/first-1/plan.json").write_text(text)
    (problem,) = problems(path)
    assert problem.code == "E173" and "first-1/plan.json" in problem.what


# The tokenizer: ids have to stand for what the weights were trained with.


def vocabulary_file(file: Path, change) -> Path:
    """The tokenizer of the data with another vocabulary."""
    content = json.loads(reversed_digits.tokenizer_json())
    content["model"]["vocab"] = change(content["model"]["vocab"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def swapped(vocabulary: dict) -> dict:
    return {**vocabulary, "4": vocabulary["5"], "5": vocabulary["4"]}


def larger(vocabulary: dict) -> dict:
    return {**vocabulary, "É": 48, "Ü": 49}


def smaller(vocabulary: dict) -> dict:
    return {token: number for token, number in vocabulary.items() if token not in "?>"}


@pytest.fixture(params=["hugging face", "converted", "run, own data", "run, prepared data"])
def checkpoint(request, manifest, from_a_run, tmp_path):
    """(a manifest that starts from a checkpoint, where that checkpoint's tokenizer lies)"""
    kind = request.param
    if kind == "hugging face":
        return manifest(config_of("softmax router")), tmp_path / "hf/tokenizer.json"
    if kind == "converted":
        path = manifest(config_of("softmax router"))
        shape = make_plan(path).manifest.model.model_dump(mode="json", exclude={"checkpoint"})
        (tmp_path / "hf/config.json").unlink()
        (tmp_path / "hf/model.json").write_text(json.dumps({"model": shape}))
        (tmp_path / "hf/complete.json").write_text("{}")
        return path, tmp_path / "hf/tokenizer/tokenizer.json"
    path = from_a_run()
    if kind == "run, prepared data":
        return path, tmp_path / "runs/first-1/data/tokenizer.json"
    plan = json.loads((tmp_path / "runs/first-1/plan.json").read_text())
    entry = next(i for i in plan["content"]["inputs"] if i["key"] == "data.tokenizer")
    entry.update(kind="local", path="own/tokenizer.json")
    plan["local"]["base_directory"] = str(tmp_path / "first")
    (tmp_path / "runs/first-1/plan.json").write_text(json.dumps(plan))
    return path, tmp_path / "first/own/tokenizer.json"


@pytest.mark.parametrize(("change", "first"), [(swapped, "'5'"), (larger, "'É'")])
def test_a_tokenizer_with_other_ids_than_the_checkpoint_is_refused(checkpoint, change, first):
    path, file = checkpoint
    vocabulary_file(file, change)
    (problem,) = problems(path)
    assert (
        problem.code == "E178" and f"2 of {50 if change is larger else 48} tokens" in problem.what
    )
    assert f"first {first}" in problem.what and str(file) in problem.fix
    assert path.read_text().splitlines()[problem.line - 1].startswith("tokenizer")


def test_the_same_tokenizer_and_an_extended_one_are_accepted(checkpoint):
    path, file = checkpoint
    make_plan(path)  # the checkpoint has left no tokenizer
    for same in (dict, smaller):
        vocabulary_file(file, same)
        make_plan(path)


def test_a_checkpoint_whose_tokenizer_cannot_be_read_is_refused(checkpoint):
    path, file = checkpoint
    vocabulary_file(file, dict).write_text('{"a": 1}')
    (problem,) = problems(path)
    assert problem.code == "E178" and str(file) in problem.what


def test_prepared_data_has_a_tokenizer_too(edited, tmp_path):
    write_hugging_face(tmp_path / "hf", config_of("softmax router"))
    vocabulary_file(tmp_path / "hf/tokenizer.json", swapped)
    text = edited().read_text()
    start, end = text.index("[model]"), text.index(SHAPE_END)
    path = tmp_path / "run.toml"
    path.write_text(f'{text[:start]}[model]\ncheckpoint = "hf"\n{text[end:]}')
    assert [problem.code for problem in problems(path)] == ["E178"]
