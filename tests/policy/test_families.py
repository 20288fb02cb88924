"""Every kind of model against its family's own Hugging Face class, in both directions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from miles_olmo.base.errors import CheckpointError
from miles_olmo.manifest.models import Model
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.export_code import load_hugging_face
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from miles_olmo.policy.generation import CoreEngineModel
from miles_olmo.policy.hugging_face_weights import read_hugging_face_weights
from miles_olmo.policy.initial_weights import load_initial_weights
from miles_olmo.wire.generation import SamplingRequest
from tests.model_zoo import EOS, MORE, ZOO, random_prompts, write_checkpoint

torch.set_num_threads(1)
CPU = torch.device("cpu")
ALL = {**ZOO, **MORE}


def imported(model: Model, directory: Path):
    adapter = adapter_for(model.family)
    module = adapter.build(model, None, device=CPU, seed=3)
    load_initial_weights(directory, module, adapter)
    return adapter, module


def export(model: Model, module, source: Path, directory: Path) -> dict:
    tokenizer = ExportTokenizer(source / "tokenizer.json", "<eos>", "<bos>", "<pad>")
    return adapter_for(model.family).export(
        module, model, tokenizer, directory, plan_digest=None, step=None
    )


def with_std(model: Model, std: float) -> Model:
    shape = model.shape.model_copy(update={"initializer_std": std})
    return model.model_copy(update={"shape": shape})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Hugging Face checkpoints by name, each written once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            directory = tmp_path_factory.mktemp("zoo") / "checkpoint"
            made[name] = write_checkpoint(ALL[name], directory, max_shard_size="400KB")
        return made[name]

    return get


@pytest.mark.parametrize("name", ALL)
def test_an_import_and_an_export_give_back_every_byte(name, checkpoints, tmp_path):
    source = checkpoints(name)
    _, module = imported(ALL[name], source)
    report = export(ALL[name], module, source, tmp_path / "export")
    before, after = (read_hugging_face_weights(path) for path in (source, tmp_path / "export"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    check = report["logits_check"]
    assert check["max_abs_logit"] > 4 and check["num_tokens_beyond"] == 0
    assert check["max_abs_difference"] <= 5e-6 * check["max_abs_logit"]


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_the_hugging_face_class(name, tmp_path):
    model = with_std(ALL[name], 0.05)
    source = write_checkpoint(model, tmp_path / "source", seed=1)
    adapter, module = imported(model, source)
    theirs = load_hugging_face(source, model.family, "float32")
    for prompt in random_prompts(6, seed=2, longest=60):
        ids_BT = torch.tensor([prompt])
        with torch.no_grad():
            expected = theirs(input_ids=ids_BT, use_cache=False).logits
        assert (adapter.logits(module, ids_BT) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("name", ZOO)
def test_greedy_tokens_are_those_of_the_export(name, checkpoints, tmp_path):
    model, source = ALL[name], checkpoints(name)
    adapter, module = imported(model, source)
    export(model, module, source, tmp_path / "export")
    prompts = random_prompts(64)
    theirs = greedy_by_transformers(
        load_hugging_face(tmp_path / "export", model.family, "float32"), prompts
    )
    assert greedy_by_core(adapter, module, prompts) == theirs
    assert len({tuple(tokens) for tokens in theirs}) > 32


def greedy_by_core(adapter, module, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    engine = CoreEngineModel(module, adapter, max_batch_size=64)
    for index, prompt in enumerate(prompts):
        request = SamplingRequest(tuple(prompt), count, 0.0, 0, (EOS,), ignore_stop=True)
        engine.add(str(index), request)
    done = {}
    while engine.num_unfinished:
        done.update(engine.step())
    return [list(done[str(index)].token_ids) for index in range(len(prompts))]


def greedy_by_transformers(model, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    """With the cache, one batch per length of the prompts."""
    settings = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}
    found: dict[int, list[int]] = {}
    for length in {len(prompt) for prompt in prompts}:
        rows = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        ids = torch.tensor([prompts[index] for index in rows])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings
        )
        found |= dict(zip(rows, out[:, length:].tolist(), strict=True))
    return [found[index] for index in range(len(prompts))]


@pytest.mark.parametrize(
    ("file_dtype", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")]
)
def test_weights_are_cast_to_the_dtype_of_the_policy(tmp_path, file_dtype, dtype):
    model = ZOO["olmoe"].model_copy(update={"dtype": dtype})
    source = write_checkpoint(model, tmp_path / "source", dtype=file_dtype)
    adapter, module = imported(model, source)
    files = load_file(source / "model.safetensors")
    for name, tensor in adapter.publication_tensors(module):
        assert torch.equal(tensor, files[name].to(getattr(torch, dtype)))


def test_an_olmoe_policy_in_bfloat16_is_compared_in_float32(tmp_path):
    model = ZOO["olmoe"].model_copy(update={"dtype": "bfloat16"})
    source = write_checkpoint(model, tmp_path / "source")
    _, module = imported(model, source)
    check = export(model, module, source, tmp_path / "export")["logits_check"]
    assert check["max_abs_difference"] < 1e-4 and check["num_tokens_beyond"] == 0
    assert (
        load_file(tmp_path / "export/model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    )


def _remove_a_shard(source: Path) -> None:
    min(source.glob("model-*.safetensors")).unlink()


def _truncate_a_shard(source: Path) -> None:
    shard = min(source.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])


def _swap_two_shards(source: Path) -> None:
    one, two, *_ = sorted(source.glob("model-*.safetensors"))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)


@pytest.mark.parametrize("damage", [_remove_a_shard, _truncate_a_shard, _swap_two_shards])
def test_shards_that_are_not_those_of_the_index_are_refused(tmp_path, damage):
    source = write_checkpoint(ZOO["olmoe"], tmp_path / "source", max_shard_size="400KB")
    damage(source)
    with pytest.raises(CheckpointError, match="E440"):
        imported(ZOO["olmoe"], source)


@pytest.mark.parametrize("name", ["olmoe, renormalised", "softmax router", "dense first layer"])
def test_weights_of_another_model_are_refused_and_change_nothing(name, checkpoints):
    model = ALL[name]
    adapter = adapter_for(model.family)
    module = adapter.build(model, None, device=CPU, seed=3)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointError, match="E441"):
        load_initial_weights(checkpoints("olmoe"), module, adapter)
    assert all(torch.equal(before[key], tensor) for key, tensor in module.state_dict().items())
