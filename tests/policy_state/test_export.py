"""Hugging Face exports: loadable without this project, and the same policy."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from miles_olmo.base.errors import CheckpointError
from miles_olmo.manifest.models import Model, ModelShape
from miles_olmo.policy import export as exports
from miles_olmo.policy.export import export_policy
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from miles_olmo.policy.olmo3moe_tensors import publication_tensors

from .conftest import build_module
from .portable_forward import block_forward

DIGEST = "d" * 64


@pytest.fixture(autouse=True)
def portable(monkeypatch):
    from olmo_core.nn.ddp.block import OLMoDDPTransformerBlock

    monkeypatch.setattr(OLMoDDPTransformerBlock, "combined_forward_no_ep", block_forward)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ExportTokenizer:
    words = ["<pad>", "<bos>", "<eos>", *"0123456789", "+", "="]
    built = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "<pad>"))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    built.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    built.save(str(path))
    return ExportTokenizer(path, eos_token="<eos>", bos_token="<bos>", pad_token="<pad>")


def _model(
    dtype: str = "float32",
    *,
    shared: bool = True,
    gating: str = "softmax",
    router_options=None,
    **_,
) -> Model:
    """The manifest's model that `build_module` builds with the same options."""
    normalised = bool((router_options or {}).get("normalize_expert_weights"))
    shape = ModelShape(
        vocab_size=40,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_token=2,
        expert_hidden_size=24,
        shared_expert_hidden_size=16 if shared else 0,
        router=gating,
        normalize_expert_weights=normalised,
        max_position_embeddings=48,
    )
    return Model(dtype=dtype, shape=shape)


def _module(dtype: str = "float32", **options):
    """A policy whose logits are of order one, so that an error shows."""
    module = build_module(dtype=dtype, **options)
    module._training_dtype = getattr(torch, dtype)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.mul_(4.0)
            if "norm" in name:
                tensor.add_(1.0)
    return module.eval()


def _export(
    module, tokenizer, directory: Path, dtype: str = "float32", model: Model | None = None
) -> dict:
    return export_policy(
        dict(publication_tensors(module)),
        model or _model(dtype),
        tokenizer,
        directory,
        core_logits=module,
        plan_digest=DIGEST,
        step=80,
    )


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "float32"),
        ({"shared": False, "gating": "sigmoid"}, "float32"),
        ({"router_options": {"normalize_expert_weights": 1.0}}, "float32"),
        ({}, "bfloat16"),
    ],
    ids=["softmax", "sigmoid without shared expert", "normalised", "bfloat16"],
)
def test_every_export_is_checked_against_the_policy(tokenizer, tmp_path, options, dtype):
    module = _module(dtype, **options)
    model = _model(dtype, **options)
    report = _export(module, tokenizer, tmp_path / "export", dtype, model)
    check = report["logits_check"]
    assert check["max_abs_logit"] > 0.5
    assert check["num_tokens"] == 4 * 48 + 1 + 47
    assert check["max_abs_difference"] <= check["bound"]
    assert check["num_tokens_beyond"] == 0
    if dtype == "float32":
        assert check["max_abs_difference"] < 1e-5
    assert json.loads((tmp_path / "export/miles_export.json").read_text()) == report
    assert (report["plan_digest"], report["step"]) == (DIGEST, 80)


def test_the_report_lists_every_file_with_its_sha256(tokenizer, tmp_path):
    report = _export(_module(), tokenizer, tmp_path / "export")
    files = {path.name: path for path in (tmp_path / "export").iterdir()}
    assert set(files) == {*report["files"], "miles_export.json"}
    for name, sha256 in report["files"].items():
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == sha256
    assert [entry.name for entry in tmp_path.iterdir()] == ["export"]


READER = """
import json, sys
sys.modules["olmo_core"] = None      # importing either would fail
sys.modules["miles_olmo"] = None
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
directory = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, dtype="auto").eval()
tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
fast = PreTrainedTokenizerFast.from_pretrained(directory)
ids = torch.tensor([[1, 5, 6, 7, 13, 9]])
with torch.inference_mode():
    logits = model(input_ids=ids).logits
    cached = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=39)
    plain = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=39, use_cache=False)
    padded = model.generate(
        torch.tensor([[0, 0, 1, 5, 6, 7, 13, 9], [3, 4, 1, 5, 6, 7, 13, 9]]),
        attention_mask=torch.tensor([[0, 0] + [1] * 6, [1] * 8]),
        max_new_tokens=6, do_sample=False, eos_token_id=39,
    )
print(json.dumps({
    "padded": padded.tolist(),
    "class": type(model).__name__,
    "dtype": str(model.dtype),
    "router": str(model.model.layers[0].mlp.router.gate.weight.dtype),
    "logits": logits.float().tolist(),
    "cached": cached.tolist(),
    "plain": plain.tolist(),
    "text": tokenizer.decode(fast("12+3")["input_ids"]),
    "ids": [fast("12+3")["input_ids"], tokenizer("12+3")["input_ids"]],
    "special": [fast.bos_token_id, fast.eos_token_id, fast.pad_token_id],
    "config": [model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id],
    "generation": [model.generation_config.eos_token_id, model.generation_config.pad_token_id],
    "positions": model.config.max_position_embeddings,
}))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_loads_with_transformers_alone(tokenizer, tmp_path, dtype):
    module = _module(dtype)
    _export(module, tokenizer, tmp_path / "export", dtype)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "export")],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    read = json.loads(result.stdout.splitlines()[-1])
    assert (read["class"], read["dtype"]) == ("Olmo3MoeForCausalLM", f"torch.{dtype}")
    assert read["router"] == "torch.float32"
    ids_BT = torch.tensor([[1, 5, 6, 7, 13, 9]])
    with torch.inference_mode():
        expected = module(ids_BT).float()
        for _ in range(6):
            logits = module(ids_BT)
            ids_BT = torch.cat([ids_BT, logits[:, -1:].argmax(-1)], 1)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(torch.tensor(read["logits"]), expected, rtol=0, atol=tolerance)
    if dtype == "float32":
        assert read["cached"] == read["plain"] == ids_BT.tolist()
        assert read["padded"][0] == [0, 0, *ids_BT[0].tolist()]
    assert read["text"].replace(" ", "") == "12+3"
    assert (
        read["ids"][0]
        == read["ids"][1]
        == Tokenizer.from_file(str(tokenizer.file)).encode("12+3").ids
    )
    assert read["special"] == read["config"] == [1, 2, 0]
    assert read["generation"] == [2, 0]
    assert read["positions"] == 48


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_that_computes_something_else_is_refused(tokenizer, tmp_path, dtype):
    module, other = _module(dtype), _module(dtype, seed=3)
    with pytest.raises(CheckpointError) as caught:
        export_policy(
            dict(publication_tensors(module)),
            _model(dtype),
            tokenizer,
            tmp_path / "export",
            core_logits=other,
            plan_digest=DIGEST,
            step=1,
        )
    assert caught.value.code == "E430"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_whose_gate_and_up_are_swapped_are_noticed(tokenizer, tmp_path, dtype):
    module, swapped = _module(dtype), _module(dtype)
    with torch.no_grad():
        for block in swapped.blocks.values():
            up, gate = block.routed_experts.w_up_gate.clone().chunk(2, dim=1)
            block.routed_experts.w_up_gate.copy_(torch.cat([gate, up], 1))
    with pytest.raises(CheckpointError, match="E430"):
        export_policy(
            dict(publication_tensors(module)),
            _model(dtype),
            tokenizer,
            tmp_path / "export",
            core_logits=swapped,
            plan_digest=DIGEST,
            step=1,
        )


def test_nan_logits_are_refused(tokenizer, tmp_path):
    module = _module()
    with torch.no_grad():
        module.lm_head.w_out.weight[3, 3] = float("nan")
    with pytest.raises(CheckpointError, match=r"E430.*nan"):
        _export(module, tokenizer, tmp_path / "export")


def test_a_failed_export_keeps_the_one_before(tokenizer, tmp_path):
    report = _export(_module(), tokenizer, tmp_path / "export")
    with pytest.raises(CheckpointError, match="E433"):
        _export(
            _module(seed=2), ExportTokenizer(tokenizer.file, eos_token="<end>"), tmp_path / "export"
        )
    assert json.loads((tmp_path / "export/miles_export.json").read_text()) == report
    assert [entry.name for entry in tmp_path.iterdir()] == ["export"]


def test_large_policies_are_cut_into_shards(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(exports, "MAX_FILE_BYTES", 60_000)
    report = _export(_module(), tokenizer, tmp_path / "export")
    assert sum(name.endswith(".safetensors") for name in report["files"]) > 1
    assert "model.safetensors.index.json" in report["files"]


def test_a_router_bias_cannot_be_exported(tokenizer, tmp_path):
    module = _module(router_options={"score_correction_bias": True})
    with pytest.raises(CheckpointError, match="E431"):
        _export(module, tokenizer, tmp_path / "export")


@pytest.mark.parametrize("text", ["{", '{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    source = ExportTokenizer(tmp_path / "tokenizer.json", eos_token="<eos>")
    with pytest.raises(CheckpointError, match="E433"):
        _export(_module(), source, tmp_path / "export")


def test_a_missing_tokenizer_file_is_a_named_error(tmp_path):
    source = ExportTokenizer(tmp_path / "none.json", eos_token="<eos>")
    with pytest.raises(CheckpointError, match="E432"):
        _export(_module(), source, tmp_path / "export")


def test_a_tokenizer_with_few_tokens_and_a_large_id_is_refused(tokenizer, tmp_path):
    from tokenizers import Tokenizer, models

    sparse = {"<eos>": 0, "<bos>": 1, "far": 10_000}
    Tokenizer(models.WordLevel(sparse, "<eos>")).save(str(tmp_path / "sparse.json"))
    source = ExportTokenizer(tmp_path / "sparse.json", eos_token="<eos>")
    with pytest.raises(CheckpointError, match=r"E433.*10000"):
        _export(_module(), source, tmp_path / "export")
