"""Checkpoints in another layout: both directions, the check of their logits, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from miles_olmo.api import converting
from miles_olmo.api.converting import convert_checkpoint, export_run
from miles_olmo.api.planning import make_plan, write_plan
from miles_olmo.base.errors import MilesError
from miles_olmo.base.rundir import RunDirectory
from miles_olmo.jobs.convert import convert
from miles_olmo.policy import export as exports
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.atomic_directory import remove_directory
from miles_olmo.policy.checkpoint import TrainerState, save_checkpoint
from miles_olmo.policy.export_code import load_hugging_face
from miles_olmo.policy.hugging_face_weights import read_hugging_face_weights
from miles_olmo.policy.initial_weights import load_initial_weights
from miles_olmo.policy.optimizer import PolicyOptimizer
from tests.model_zoo import ZOO, write_checkpoint

torch.set_num_threads(1)
CPU = torch.device("cpu")
NAMES = ["dense first layer", "olmoe"]


@pytest.fixture(params=NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture
def source(name, tmp_path) -> Path:
    return write_checkpoint(ZOO[name], tmp_path / "source")


def error_of(*arguments, **options) -> MilesError:
    with pytest.raises(MilesError) as caught:
        convert(*arguments, **options)
    return caught.value


def test_there_and_back_every_byte_is_the_same(name, source, tmp_path):
    core, back = tmp_path / "core", tmp_path / "back"
    receipt = convert(source, core)
    assert receipt["direction"] == "to-core" and receipt["family"] == ZOO[name].family
    check = receipt["logits_check"]
    assert 0 < check["max_abs_difference"] < check["bound"] / 10
    stored = json.loads((core / "conversion.json").read_text())
    assert stored == {k: v for k, v in receipt.items() if k != "destination"}
    assert convert(core, back)["direction"] == "to-hugging-face"
    before, after = read_hugging_face_weights(source), read_hugging_face_weights(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (back / file).read_bytes() == (source / file).read_bytes()
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    old, new = (json.loads((path / "config.json").read_text()) for path in (source, back))
    assert [new[key] for key in ids] == [old[key] for key in ids] == [1, 2, 0]


def test_a_run_can_start_from_a_converted_checkpoint(name, source, tmp_path, own_data):
    convert(source, tmp_path / "core")
    path = own_data()
    text = path.read_text()
    start, end = text.index("[model]"), text.index("[data]")
    data = text[end:].replace('"tokenizer.json"', '"core/tokenizer/tokenizer.json"')
    path.write_text(f'{text[:start]}[model]\ncheckpoint = "core"\n\n{data}')
    model = make_plan(path).manifest.model
    assert (model.family, model.shape.windows) == (ZOO[name].family, ZOO[name].shape.windows)
    adapter = adapter_for(model.family)
    module = adapter.build(model, None, device=CPU, seed=5)
    load_initial_weights(tmp_path / "core", module, adapter)
    files = read_hugging_face_weights(source)
    for key, tensor in adapter.publication_tensors(module):
        assert torch.equal(tensor, files[key]), key
    path.write_text(path.read_text().replace("[model]", '[model]\ndtype = "bfloat16"'))
    with pytest.raises(MilesError, match="E172"):
        make_plan(path)


def test_a_damaged_converted_checkpoint_is_refused(source, name, tmp_path):
    core = tmp_path / "core"
    convert(source, core)
    weights = bytearray((core / "weights.safetensors").read_bytes())
    weights[-5] ^= 1
    (core / "weights.safetensors").write_bytes(weights)
    assert error_of(core, tmp_path / "back").code == "E401"
    adapter = adapter_for(ZOO[name].family)
    module = adapter.build(ZOO[name], None, device=CPU, seed=5)
    with pytest.raises(MilesError, match="E401"):
        load_initial_weights(core, module, adapter)


def test_a_dtype_can_be_chosen(source, tmp_path):
    convert(source, tmp_path / "core", dtype="bfloat16")
    original = load_file(source / "model.safetensors")
    for key, tensor in load_file(tmp_path / "core/weights.safetensors").items():
        assert torch.equal(tensor, original[key].bfloat16())
    error = error_of(tmp_path / "core", tmp_path / "back", dtype="float32")
    assert error.code == "E444" and not (tmp_path / "back").exists()


@pytest.mark.parametrize("direction", ["to-core", "to-hugging-face"])
def test_other_logits_are_an_error_and_nothing_is_left(tmp_path, monkeypatch, direction):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    if direction == "to-hugging-face":
        convert(source, tmp_path / "core")
        source = tmp_path / "core"
    before = sorted(tmp_path.iterdir())
    monkeypatch.setitem(exports.LOGITS_BOUND, "float32", 1e-12)
    error = error_of(source, tmp_path / "result")
    assert error.code == ("E442" if direction == "to-core" else "E430")
    assert "differ" in error.what and float(error.details["max_abs_difference"]) > 0
    assert sorted(tmp_path.iterdir()) == before


def test_nothing_is_overwritten(source, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine.txt").write_text("mine")
    assert error_of(source, tmp_path / "there").code == "E443"
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine.txt"]


def test_a_source_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        error = error_of(path, tmp_path / "result")
        assert error.code == "E444" and str(path) in error.what


def test_a_model_that_is_not_supported_is_refused_by_name(tmp_path):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "clip_qkv": 8.0}))
    error = error_of(source, tmp_path / "result")
    assert error.code == "E171" and "clip_qkv = 8.0" in error.what
    assert not (tmp_path / "result").exists()


def test_quantized_weights_are_refused(tmp_path):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    error = error_of(source, tmp_path / "result")
    assert error.code == "E440" and "'lm_head.weight' is int8" in error.what


@pytest.mark.parametrize("lie", [{"num_hidden_layers": 10**7}, {"hidden_size": 10**7}])
def test_a_description_of_a_far_larger_model_takes_no_memory(tmp_path, lie):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | lie))
    error = error_of(source, tmp_path / "result")
    assert error.code == "E441" and "config.json describes" in error.what


def test_a_config_that_is_nested_too_deep_is_refused(tmp_path):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    (source / "config.json").write_text("[" * 100_000)
    assert error_of(source, tmp_path / "result").code == "E173"


def changed_json(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("value", [3, True, {"a": 1}, "LlamaForCausalLM"])
def test_architectures_that_are_no_list_are_refused(source, tmp_path, value):
    changed_json(source / "config.json", architectures=value)
    error = error_of(source, tmp_path / "result")
    assert error.code == "E173" and repr(value) in error.why


@pytest.mark.parametrize("file", [3, None, True, ["a"], {}])
def test_an_index_that_names_no_file_is_refused(source, tmp_path, file):
    index = {"weight_map": {"lm_head.weight": file, "other": "model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    error = error_of(source, tmp_path / "result")
    assert error.code == "E440" and "index.json cannot be read" in error.what


@pytest.mark.parametrize(
    ("which", "changes"),
    [
        ("olmoe", {"norm_topk_prob": "x"}),
        ("olmoe", {"num_key_value_heads": 0}),
        ("olmoe", {"rope_parameters": []}),
        ("dense first layer", {"head_dim": 0}),
        ("dense first layer", {"layer_types": []}),
        ("dense first layer", {"rms_norm_eps": 10**30}),  # raises in the forward pass
    ],
)
def test_values_that_only_the_hugging_face_class_refuses_are_named(tmp_path, which, changes):
    source = write_checkpoint(ZOO[which], tmp_path / "source")
    changed_json(source / "config.json", **changes)
    error = error_of(source, tmp_path / "result")
    assert error.code == "E448" and "transformers says: " in error.why
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("config.json", {"eos_token_id": 128}, "eos_token_id = 128"),
        ("config.json", {"eos_token_id": [2, 999]}, "eos_token_id = [2, 999]"),
        ("config.json", {"bos_token_id": -1}, "bos_token_id = -1"),
        ("config.json", {"pad_token_id": "<pad>"}, "pad_token_id = '<pad>'"),
        ("config.json", {"eos_token_id": True}, "eos_token_id = True"),
        ("generation_config.json", {"eos_token_id": 128}, "eos_token_id = 128"),
    ],
)
def test_special_token_ids_that_the_model_does_not_have_are_refused(tmp_path, file, changes, named):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    changed_json(source / file, **changes)
    error = error_of(source, tmp_path / "result")
    assert error.code == "E433" and named in error.what and str(source) in error.what
    assert not (tmp_path / "result").exists()


@pytest.mark.parametrize("text", ['{"a": 1}', "", "[" * 10_000])
def test_a_file_that_is_no_tokenizer_is_not_copied(tmp_path, text):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    (source / "tokenizer.json").write_text(text)
    error = error_of(source, tmp_path / "result")
    assert error.code == "E433" and "tokenizer.json" in error.what


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_not_copied(tmp_path):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens(["<more>"])
    tokenizer.save(str(source / "tokenizer.json"))
    error = error_of(source, tmp_path / "result")
    assert error.code == "E433" and "token ids up to 128" in error.what


def test_a_checkpoint_without_a_tokenizer_or_special_ids_is_converted(tmp_path):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / file).unlink()
    changed_json(source / "config.json", bos_token_id=None, eos_token_id=None, pad_token_id=None)
    convert(source, tmp_path / "core")
    assert json.loads((tmp_path / "core/model.json").read_text())["special_token_ids"] == {
        "bos": None,
        "eos": None,
        "pad": None,
    }


def test_a_link_to_nowhere_is_in_the_way(source, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert error_of(source, tmp_path / "link").code == "E443"


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    (tmp_path / "file").write_text("")
    assert error_of(source, tmp_path / "file/result").code == "E445"


# Runs.


@pytest.fixture
def run(own_data, tmp_path) -> RunDirectory:
    """A run that was left with checkpoints of two steps, as a trainer writes them."""
    sizes = [("hidden_size = 128", "hidden_size = 64"), ("num_experts = 8", "num_experts = 4")]
    plan = make_plan(own_data(*sizes))
    directory = RunDirectory(tmp_path / "runs" / "small-1")
    directory.root.mkdir(parents=True)
    write_plan(plan, directory.plan)
    model = plan.manifest.model
    adapter = adapter_for(model.family)
    for step in (10, 20):
        module = adapter.build(model, plan.manifest.train, device=CPU, seed=step)
        optimizer = PolicyOptimizer(module, plan.manifest.train.optimizer)
        topology = {"data": 1, "expert": 1}
        state = TrainerState(step, step, 0, {}, topology, plan.digest)
        save_checkpoint(directory.checkpoints, state, module, optimizer, adapter, keep=2)
    return directory


def test_a_run_is_exported_at_its_newest_or_a_chosen_step(run):
    runs = run.root.parent
    newest = export_run("small-1", runs=runs)
    assert (newest.step, newest.destination) == (20, run.root / "exports/step-000020")
    assert newest.max_abs_difference < 1e-5 and newest.num_tokens > 100
    report = json.loads((newest.destination / "miles_export.json").read_text())
    assert (
        report["step"] == 20 and report["plan_digest"] == json.loads(run.plan.read_text())["digest"]
    )
    older = convert(run.checkpoint(10), run.root / "older")
    assert older["step"] == 10
    for step, path in ((20, newest.destination), (10, run.root / "older")):
        weights = load_file(run.checkpoint(step) / "weights.safetensors")
        assert all(torch.equal(weights[k], v) for k, v in read_hugging_face_weights(path).items())
        load_hugging_face(path, "olmo3moe", "float32")
    with pytest.raises(MilesError, match="E443"):
        export_run("small-1", runs=runs)
    with pytest.raises(MilesError, match=r"E446.*10, 20"):
        export_run("small-1", step=15, out=run.root / "no", runs=runs)
    (run.checkpoint(20) / "complete.json").unlink()
    assert convert(run.root, run.root / "whole")["step"] == 10


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("step", [None, 20])
def test_a_checkpoint_that_a_living_run_removes_is_exported_whole(run, monkeypatch, step, links):
    """The run removes it as soon as the export has begun."""
    if not links:  # as on a disk that has none
        monkeypatch.setattr(Path, "hardlink_to", lambda *_: os.link("/", "/link"))
    weights = load_file(run.checkpoint(20) / "weights.safetensors")
    started = subprocess.run

    def start(*arguments, **options):
        remove_directory(run.checkpoint(20))
        return started(*arguments, **options)

    monkeypatch.setattr(converting.subprocess, "run", start)
    exported = export_run("small-1", step=step, runs=run.root.parent)
    assert exported.step == 20
    found = read_hugging_face_weights(exported.destination)
    assert all(torch.equal(weights[name], value) for name, value in found.items())
    assert [path.name for path in exported.destination.parent.iterdir()] == ["step-000020"]


def test_a_checkpoint_that_is_removed_before_it_could_be_held_is_not_waited_for(run, monkeypatch):
    """The newest one is taken then; one that was named is missed."""
    whole = converting.held_directory

    def late(source, target):
        if source.name == "step-000020":
            remove_directory(source)
        return whole(source, target)

    monkeypatch.setattr(converting, "held_directory", late)
    assert export_run("small-1", runs=run.root.parent).step == 10
    with pytest.raises(MilesError, match=r"E446.*steps: 10"):
        export_run("small-1", step=20, runs=run.root.parent)


def test_a_changed_tokenizer_is_noticed(run):
    plan = json.loads(run.plan.read_text())
    tokenizer = Path(plan["local"]["base_directory"]) / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert error_of(run.root, run.root / "out").code == "E352"
    assert not (run.root / "out").exists()


# The command line, and the process behind it.


def miles(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "miles_olmo", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_commands_print_the_check_and_name_their_errors(tmp_path):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source")
    done = miles("prepare", "checkpoint", source, tmp_path / "core", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "miles-olmo/conversion/v1"
    assert document["max_abs_difference"] <= document["bound"]
    again = miles("prepare", "checkpoint", source, tmp_path / "core")
    assert (again.returncode, again.stdout) == (2, "") and again.stderr.startswith("E443: ")


def test_a_process_that_ends_without_a_result_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text("raise SystemExit('killed here')")
    with pytest.raises(MilesError, match=r"E447.*killed here"):
        convert_checkpoint(tmp_path / "source", tmp_path / "result")
