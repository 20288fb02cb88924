"""AdamW over a policy, its schedule, and its refusal of NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from miles_olmo.base.errors import CheckpointError, TrainingError
from miles_olmo.manifest.models import Optimizer, Schedule
from miles_olmo.policy.optimizer import PolicyOptimizer, is_matrix
from miles_olmo.policy.schedule import learning_rate

from .conftest import build_module


def _module(dtype=torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).to(dtype)


def _backward(module: nn.Module, seed: int, factor: float = 1.0) -> None:
    dtype = next(module.parameters()).dtype
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)
    (module(inputs).square().mean() * factor).backward()


def test_weight_decay_acts_on_matrices_and_on_the_flat_router_only():
    module = build_module(num_layers=1)
    decayed = {name for name, p in module.named_parameters() if is_matrix(name, p)}
    others = {name for name, _ in module.named_parameters()} - decayed
    assert "blocks.0.routed_experts_router.weight" in decayed
    assert {"blocks.0.routed_experts.w_up_gate", "embeddings.weight"} <= decayed
    assert others == {
        "blocks.0.attention.q_norm.weight",
        "blocks.0.attention.k_norm.weight",
        "blocks.0.attention_norm.weight",
        "blocks.0.feed_forward_norm.weight",
        "lm_head.norm.weight",
    }
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    PolicyOptimizer(module, Optimizer(learning_rate=0.5, weight_decay=0.1)).step(0.5)
    for name, parameter in module.named_parameters():  # no gradient: decay is all there is
        factor = 0.95 if name in decayed else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_a_step_equals_torchs_adamw_with_clipped_gradients():
    ours, theirs = _module(), _module()
    settings = Optimizer(learning_rate=0.01, weight_decay=0.1, max_grad_norm=0.05)
    optimizer = PolicyOptimizer(ours, settings)
    reference = torch.optim.AdamW(
        [
            {"params": [theirs[0].weight], "weight_decay": 0.1},
            {"params": [theirs[0].bias, theirs[1].weight, theirs[1].bias], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=settings.betas,
        eps=settings.eps,
    )
    for step in range(4):
        _backward(ours, step)
        _backward(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        reference.step()
        reference.zero_grad()
        assert optimizer.step(0.01) == pytest.approx(norm.item(), rel=1e-6)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    module = _module()
    optimizer = PolicyOptimizer(module, Optimizer(learning_rate=0.1))
    _backward(module, 0)
    optimizer.step(0.1)
    before = {k: v.clone() for k, v in (module.state_dict() | optimizer.state_tensors()).items()}
    _backward(module, 1)
    module[0].weight.grad[1, 2] = bad
    with pytest.raises(TrainingError) as caught:
        optimizer.step(0.1)
    assert caught.value.code == "E310"
    assert caught.value.details["tensors"] == ["0.weight"]
    after = module.state_dict() | optimizer.state_tensors()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert optimizer.num_updates == 1


def test_a_large_finite_gradient_is_clipped_not_refused():
    module = _module()
    optimizer = PolicyOptimizer(module, Optimizer(learning_rate=0.1))
    _backward(module, 0)
    module[0].weight.grad[0, 0] = 1e30  # its square overflows float32
    assert optimizer.step(0.1) == pytest.approx(1e30)
    assert all(bool(torch.isfinite(p).all()) for p in module.parameters())


def test_small_updates_of_a_bfloat16_policy_add_up_in_the_master_weights():
    module = _module(torch.bfloat16)
    with torch.no_grad():
        module[0].weight.fill_(1.0)
    optimizer = PolicyOptimizer(module, Optimizer(learning_rate=1e-4))
    for _ in range(100):  # each update of about 1e-4 is below bfloat16's spacing at 1
        module[0].weight.grad = torch.ones_like(module[0].weight)
        optimizer.step(1e-4)
    assert module[0].weight.dtype == torch.bfloat16
    assert module[0].weight.float().mean().item() == pytest.approx(0.99, abs=0.004)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_continues_bit_for_bit(dtype):
    module = _module(dtype)
    optimizer = PolicyOptimizer(module, Optimizer(learning_rate=0.05, weight_decay=0.1))
    for step in range(3):
        _backward(module, step)
        optimizer.step(0.05)
    weights = {k: v.clone() for k, v in module.state_dict().items()}
    state = {k: v.clone() for k, v in optimizer.state_tensors().items()}
    other = _module(dtype, seed=9)
    restored = PolicyOptimizer(other, Optimizer(learning_rate=0.05, weight_decay=0.1))
    other.load_state_dict(weights)
    restored.load_state(state, optimizer.num_updates)
    assert restored.num_updates == 3
    for step in range(3, 6):
        for m, o in ((module, optimizer), (other, restored)):
            _backward(m, step)
            o.step(0.05)
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True)
    )


def test_a_foreign_state_is_refused():
    state = PolicyOptimizer(_module(), Optimizer(learning_rate=0.1)).state_tensors()
    other = PolicyOptimizer(nn.Linear(4, 3), Optimizer(learning_rate=0.1))
    with pytest.raises(CheckpointError, match="E404"):
        other.load_state(state, 3)
    wrong_shape = {name: torch.zeros(2) for name in other.state_tensors()}
    with pytest.raises(CheckpointError, match="E404"):
        other.load_state(wrong_shape, 3)
    assert other.num_updates == 0


def test_the_learning_rate_ramps_falls_and_ends_where_it_should():
    def rates(**schedule) -> list[float]:
        return [learning_rate(update, 2.0, Schedule(**schedule), 9) for update in range(10)]

    assert rates() == [2.0] * 10
    linear = rates(kind="linear", ramp_steps=3, final_fraction=0.1)
    assert linear[:4] == [0.5, 1.0, 1.5, 2.0]
    assert linear[8:] == pytest.approx([0.2, 0.2])
    assert linear[3:9] == sorted(linear[3:9], reverse=True)
    cosine = rates(kind="cosine", ramp_steps=0, final_fraction=0.5)
    assert (cosine[0], cosine[4], cosine[8]) == pytest.approx((2.0, 1.5, 1.0))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("num_updates", [1, 2, 5])
def test_a_ramp_as_long_as_the_run_still_gives_positive_rates(kind, num_updates):
    schedule = Schedule(kind=kind, ramp_steps=5, final_fraction=0.1)
    assert all(0 < learning_rate(u, 1.0, schedule, num_updates) <= 1.0 for u in range(num_updates))
