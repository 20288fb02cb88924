"""The project's own model goes through tensors, optimizer, checkpoint, publication and export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import nn

from miles_olmo.algo.loss import policy_loss
from miles_olmo.algo.normaliser import LossNormaliser
from miles_olmo.algo.pack import Pack
from miles_olmo.algo.pack_builder import TrainingSequence, build_pack, build_packs
from miles_olmo.manifest.models import Algorithm, Model, ModelShape, Optimizer
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.checkpoint import TrainerState, load_checkpoint, save_checkpoint
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from miles_olmo.policy.olmo3moe_forward import reference_logits
from miles_olmo.policy.optimizer import PolicyOptimizer

ADAPTER = adapter_for("olmo3moe")


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


def _build(model: Model, seed: int = 0) -> nn.Module:
    return ADAPTER.build(model, None, device=torch.device("cpu"), seed=seed)


def _sequences(count: int) -> list[TrainingSequence]:
    """Sequences of different lengths with advantages, behaviour logprobs and masks."""
    generator = torch.Generator().manual_seed(3)
    sequences = []
    for index in range(count):
        length = 4 + 3 * index
        mask_T = torch.arange(length) > index
        behaviour_T = -3.5 + torch.randn(length, generator=generator) * 0.3
        sequences.append(
            TrainingSequence(
                index=index,
                sample_id=f"0.{index}",
                ids_T=torch.randint(0, 40, (length,), generator=generator),
                mask_T=mask_T,
                behaviour_logprobs_T=behaviour_T * mask_T,
                routes_TLK=None,
                advantage=float(torch.randn((), generator=generator)),
            )
        )
    return sequences


def _accumulate(module: nn.Module, packs: list[Pack], aggregation: str = "token") -> float:
    """Loss of the batch; gradients are left in the module."""
    normaliser = LossNormaliser.of_packs(packs, constant_length=16)
    total = 0.0
    for pack in packs:
        output = ADAPTER.forward(module, pack, temperature=1.0)
        loss, _ = policy_loss(
            pack, output.logprobs_T, Algorithm(aggregation=aggregation), normaliser
        )
        loss.backward()
        total += loss.item()
    return total


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
    module = _build(model)
    report = ADAPTER.export(
        module,
        model,
        ExportTokenizer(tmp_path / "tokenizer.json", eos_token="<eos>"),
        tmp_path / "export",
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
    ADAPTER.load_tensors(other, dict(ADAPTER.publication_tensors(one)))
    ids_BT = torch.arange(12).view(2, 6)
    assert torch.equal(reference_logits(one, ids_BT), reference_logits(other, ids_BT))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_its_gradient_does_not_depend_on_how_the_batch_is_packed(aggregation):
    module, sequences = _build(_model()), _sequences(5)
    results = []
    for packs in (
        [build_pack(sequences)],
        [build_pack([sequence]) for sequence in reversed(sequences)],
        build_packs(sequences, 20),
        [build_pack([sequences[i] for i in (4, 0, 2)]), build_pack([sequences[i] for i in (3, 1)])],
    ):
        module.zero_grad(set_to_none=True)
        loss = _accumulate(module, packs, aggregation)
        results.append((loss, {name: p.grad.clone() for name, p in module.named_parameters()}))
    base_loss, base = results[0]
    for loss, gradients in results[1:]:
        assert loss == pytest.approx(base_loss, rel=1e-5)
        for name, gradient in gradients.items():
            assert (gradient - base[name]).norm() <= 1e-5 * base[name].norm(), name


def test_its_training_continues_bit_for_bit_from_a_checkpoint(tmp_path: Path):
    model = _model(num_layers=1)
    module, other = _build(model, seed=1), _build(model, seed=2)
    settings = Optimizer(learning_rate=0.01, weight_decay=0.1)
    optimizer, restored = PolicyOptimizer(module, settings), PolicyOptimizer(other, settings)

    def train(policy: nn.Module, own: PolicyOptimizer) -> list[float]:
        losses = []
        for _ in range(3):
            losses.append(_accumulate(policy, build_packs(_sequences(3), 16)))
            own.step(0.01)
        return losses

    train(module, optimizer)
    state = TrainerState(3, 3, 3, {}, {"data": 1}, "d" * 64)
    path = save_checkpoint(tmp_path, state, module, optimizer, ADAPTER, keep=1)
    assert load_checkpoint(path, other, restored, ADAPTER, topology={"data": 1}) == state
    losses = train(module, optimizer)
    assert train(other, restored) == losses
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )
