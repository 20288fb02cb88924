"""The project's own model goes through tensors, optimizer, checkpoint, publication and export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from miles_olmo.manifest.models import Model, ModelShape, Optimizer
from miles_olmo.policy.attention import attend_documents, lay_out
from miles_olmo.policy.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from miles_olmo.policy.export import export_policy
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from miles_olmo.policy.olmo3moe_model import ForwardPass, PortableModel, build_model
from miles_olmo.policy.olmo3moe_tensors import load_tensors, publication_tensors
from miles_olmo.policy.optimizer import PolicyOptimizer

from .conftest import Tensors


@dataclass
class _Documents:
    """Each row of a batch is one document."""

    layout: object
    rules: object

    def attend(self, layer, q_THD, k_TGD, v_TGD):
        return attend_documents(q_THD, k_TGD, v_TGD, self.layout, self.rules)

    def observe(self, layer, decision) -> None:
        pass


def _logits(module: PortableModel, ids_BT: torch.Tensor) -> torch.Tensor:
    rows, length = ids_BT.shape
    layout = lay_out([length] * rows, module.rules, ids_BT.device)
    sin_TD, cos_TD = module.rotary_at(layout.positions_T)
    documents = _Documents(layout, module.rules)
    forward_pass = ForwardPass(sin_TD, cos_TD, documents, None, documents)
    return module(ids_BT.reshape(1, -1), forward_pass=forward_pass).view(rows, length, -1)


def _model(**shape) -> Model:
    fields = {
        "vocab_size": 40,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "expert_hidden_size": 24,
        "shared_expert_hidden_size": 16,
        "max_position_embeddings": 48,
        "initializer_std": 0.2,
    }
    dtype = shape.pop("dtype", "float32")
    return Model(dtype=dtype, shape=ModelShape(**(fields | shape)))


def _build(model: Model, seed: int = 0) -> PortableModel:
    return build_model(model, recompute=False, device=torch.device("cpu"), seed=seed)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"shared_expert_hidden_size": 0, "router": "sigmoid", "normalize_expert_weights": True},
        {"num_key_value_heads": 1, "rope_theta": 10_000.0},
        {"dtype": "bfloat16"},
    ],
    ids=["plain", "sigmoid", "grouped queries", "bfloat16"],
)
def test_its_export_has_its_logits(tmp_path, shape):
    (tmp_path / "tokenizer.json").write_text(
        Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, "a")).to_str()
    )
    model = _model(**shape)
    module = _build(model).eval()
    report = export_policy(
        module,
        model,
        ExportTokenizer(tmp_path / "tokenizer.json", eos_token="<eos>"),
        tmp_path / "export",
        core_logits=lambda ids_BT: _logits(module, ids_BT),
        plan_digest="d" * 64,
        step=1,
    )
    check = report["logits_check"]
    assert check["max_abs_logit"] > 0.5
    assert check["num_tokens_beyond"] <= (0 if model.dtype == "float32" else 24)
    if model.dtype == "float32":
        assert check["max_abs_difference"] < 1e-5


def test_its_tensors_load_into_another_one():
    model = _model()
    one, other = _build(model, seed=1), _build(model, seed=2)
    load_tensors(other, dict(publication_tensors(one)))
    ids_BT = torch.arange(12).view(2, 6)
    assert torch.equal(_logits(one, ids_BT), _logits(other, ids_BT))


def test_its_training_continues_bit_for_bit_from_a_checkpoint(tmp_path: Path):
    model = _model(num_layers=1)
    module, other = _build(model, seed=1), _build(model, seed=2)
    settings = Optimizer(learning_rate=0.01, weight_decay=0.1)
    optimizer, restored = PolicyOptimizer(module, settings), PolicyOptimizer(other, settings)

    def train(policy: PortableModel, steps: range, own: PolicyOptimizer) -> list[float]:
        losses = []
        for step in steps:
            ids_BT = torch.arange(16).add(step).remainder(40).view(2, 8)
            logits_BTV = _logits(policy, ids_BT)[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits_BTV.flatten(0, 1).float(), ids_BT[:, 1:].flatten()
            )
            loss.backward()
            own.step(0.01)
            losses.append(loss.item())
        return losses

    train(module, range(3), optimizer)
    state = TrainerState(3, 3, 3, {}, {"data": 1}, "d" * 64)
    path = save_checkpoint(tmp_path, state, module, optimizer, Tensors(), keep=1)
    assert load_checkpoint(path, other, restored, Tensors(), topology={"data": 1}) == state
    losses = train(module, range(3, 6), optimizer)
    assert train(other, range(3, 6), restored) == losses
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )
