"""The trainer's forward pass: packing, replay, recompute, statistics."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.base.errors import TrainingError
from tests.policy.policies import (
    ADAPTER,
    CPU,
    engine,
    generate,
    model_of,
    pack_of,
    policy,
    requests,
    without_routes,
)

WANTED = requests(8, seed=1, longest=24)
SAMPLED = generate(engine(), WANTED)


def gradients(module, packs):
    """Loss over the packs (sum of advantage-weighted logprobs), and its gradients."""
    module.zero_grad()
    total = 0.0
    for pack in packs:
        output = ADAPTER.forward(module, pack, temperature=1.0)
        loss = (output.logprobs_T * pack.advantages_T)[pack.mask_T].sum() / 100
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in module.named_parameters()}


@settings(max_examples=6, deadline=None)
@given(order=st.permutations(range(8)), cut=st.integers(1, 7))
def test_loss_and_gradient_do_not_depend_on_packing(order, cut):
    module = policy()
    loss, expected = gradients(module, [pack_of(WANTED, SAMPLED)])
    packs = [pack_of(WANTED, SAMPLED, indices=part) for part in (order[:cut], order[cut:])]
    split_loss, split = gradients(module, packs)
    assert split_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    for name, gradient in expected.items():
        assert (split[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_the_head_in_parts_holds_few_logits_and_changes_no_bit_of_a_logprob(monkeypatch):
    pack = pack_of(WANTED, SAMPLED, indices=[*range(8)] * 4)
    module = policy()
    expected = ADAPTER.forward(module, pack, temperature=0.7)
    loss, whole = gradients(module, [pack])
    largest = 40 * module.vocab_size
    monkeypatch.setattr("miles_olmo.policy.olmo3moe_forward.HEAD_VALUES", largest)
    sizes = []
    module.lm_head.register_forward_hook(lambda *call: sizes.append(call[-1].numel()))
    parts = ADAPTER.forward(module, pack, temperature=0.7)
    assert torch.equal(parts.logprobs_T, expected.logprobs_T)
    assert torch.equal(parts.entropy_T, expected.entropy_T)
    num_parts = len(sizes)
    assert num_parts > 2 and max(sizes) <= largest and min(sizes) >= 16 * module.vocab_size
    parts_loss, split = gradients(module, [pack])
    assert len(sizes) == 3 * num_parts  # once forward, once more for each part's backward
    assert parts_loss == loss
    for name, gradient in whole.items():
        assert (split[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_recompute_changes_no_bit_of_loss_or_gradient():
    pack = pack_of(WANTED, SAMPLED)
    loss, expected = gradients(policy(), [pack])
    again, recomputed = gradients(policy(recompute="block"), [pack])
    assert loss == again
    assert all(torch.equal(expected[name], recomputed[name]) for name in expected)


def test_replaying_native_routes_changes_no_bit():
    pack = pack_of(WANTED, SAMPLED)
    module = policy()
    loss, replayed = gradients(module, [pack])
    native_loss, native = gradients(module, [without_routes(pack)])
    assert loss == native_loss
    # The last token of each document is not replayed, but no loss depends on it.
    assert all(torch.equal(replayed[name], native[name]) for name in native)


def test_forced_routes_are_used_and_only_their_experts_learn():
    pack = pack_of(WANTED, SAMPLED)
    forced = torch.where(pack.routes_TLK >= 0, torch.tensor([5, 2]), -1)
    module = policy(num_layers=1)
    forced_pack = replace(pack, routes_TLK=forced[:, :1])
    output = ADAPTER.forward(module, forced_pack, temperature=1.0)
    output.logprobs_T.sum().backward()
    assert set(output.router.counts_LE[0].nonzero()[:, 0].tolist()) == {2, 5}
    experts = module.portable_blocks()[0].routed_experts
    used = {e for e in range(8) if experts.w_down.grad[e].any() or experts.w_up_gate.grad[e].any()}
    assert used == {2, 5}
    # The mixing weights come from live scores, so the router learns although its choice is forced.
    assert module.router.weight.grad.abs().max() > 0
    native = ADAPTER.forward(module, without_routes(pack), temperature=1.0)
    assert not torch.equal(native.logprobs_T, output.logprobs_T)


def test_statistics_count_what_was_replayed_and_are_not_doubled_by_recompute():
    pack = pack_of(WANTED, SAMPLED)
    required = pack.num_tokens - len(pack.document_lengths)
    for recompute in ("none", "block"):
        output = ADAPTER.forward(policy(recompute=recompute), pack, temperature=1.0)
        (output.logprobs_T.sum() + output.router.z_sums_L.sum()).backward()
        router = output.router
        assert router.num_required == router.num_replayed == router.num_positions == required
        assert router.counts_LE.sum(dim=-1).tolist() == [2 * required] * 2
        sums_L = router.probability_sums_LE.detach().sum(dim=-1)
        assert torch.allclose(sums_L, torch.full((2,), float(required)))
        assert router.native_mismatch_L.tolist() == [0, 0]


def test_a_changed_route_is_counted_as_a_mismatch():
    pack = pack_of(WANTED, SAMPLED)
    routes = pack.routes_TLK.clone()
    routes[0, 1] = (routes[0, 1] + 1) % 8
    swapped = routes[1, 0].flip(0)  # another order of the same set is no mismatch
    routes[1, 0] = swapped
    router = ADAPTER.forward(policy(), replace(pack, routes_TLK=routes), temperature=1.0).router
    changed = set(routes[0, 1].tolist()) != set(pack.routes_TLK[0, 1].tolist())
    assert router.native_mismatch_L[1] >= int(changed) and changed
    assert router.native_mismatch_L[0] == 0


def test_statistics_carry_the_same_gradient_with_recompute():
    pack = pack_of(WANTED, SAMPLED)
    found = []
    for recompute in ("none", "block"):
        module = policy(recompute=recompute)
        router = ADAPTER.forward(module, pack, temperature=1.0).router
        (router.z_sums_L.sum() + router.probability_sums_LE[:, 0].sum()).backward()
        found.append(module.router.weight.grad.clone())
    assert torch.equal(found[0], found[1]) and found[0].abs().max() > 0


def test_documents_do_not_see_each_other():
    pack = pack_of(WANTED, SAMPLED)
    first = pack.document_lengths[0]
    ids = pack.ids_T.clone()
    ids[first:] = (ids[first:] + 7) % 48
    module = policy()
    one = ADAPTER.forward(module, without_routes(pack), temperature=1.0).logprobs_T
    two = ADAPTER.forward(module, without_routes(replace(pack, ids_T=ids)), temperature=1.0)
    assert torch.equal(one[:first], two.logprobs_T[:first])
    assert not torch.equal(one[first:], two.logprobs_T[first:])


def test_logprobs_and_entropy_are_those_of_the_full_logits():
    pack = without_routes(pack_of(WANTED[:1], SAMPLED[:1]))
    module = policy()
    output = ADAPTER.forward(module, pack, temperature=0.5)
    logits_TV = ADAPTER.logits(module, pack.ids_T[None])[0]
    expected_TV = (logits_TV / 0.5).log_softmax(dim=-1)
    for token in pack.mask_T.nonzero()[:, 0].tolist():
        row = expected_TV[token - 1]
        assert float(output.logprobs_T[token].detach()) == pytest.approx(
            float(row[pack.ids_T[token]]), abs=1e-5
        )
        entropy = float(-(row.exp() * row).sum())
        assert float(output.entropy_T[token]) == pytest.approx(entropy, abs=1e-5)
    assert not output.entropy_T.requires_grad
    assert not output.logprobs_T[~pack.mask_T].any()


def test_a_pack_without_trained_tokens_is_fine():
    pack = pack_of(WANTED, SAMPLED)
    nothing = replace(pack, mask_T=torch.zeros_like(pack.mask_T))
    output = ADAPTER.forward(policy(), nothing, temperature=1.0)
    assert not output.logprobs_T.any()
    (output.logprobs_T.sum() + output.router.z_sums_L.sum()).backward()


@pytest.mark.parametrize("expert", [8, -2])
def test_a_route_out_of_range_is_refused(expert):
    pack = pack_of(WANTED, SAMPLED)
    routes = pack.routes_TLK.clone()
    routes[3, 0, 1] = expert
    with pytest.raises(TrainingError) as caught:
        ADAPTER.forward(policy(), replace(pack, routes_TLK=routes), temperature=1.0)
    assert caught.value.code == "E330"


def test_routes_of_another_shape_are_refused():
    pack = pack_of(WANTED, SAMPLED)
    with pytest.raises(TrainingError, match="E330"):
        ADAPTER.forward(policy(num_layers=3), pack, temperature=1.0)


def test_equal_seeds_give_equal_weights_whatever_the_global_generator_did():
    torch.manual_seed(1)
    one = policy(seed=7).state_dict()
    torch.manual_seed(2)
    torch.rand(100)
    two = policy(seed=7).state_dict()
    three = policy(seed=8).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    name = "blocks.1.routed_experts.w_down"
    assert not torch.equal(one[name], three[name])
    assert float(one[name].std()) == pytest.approx(0.08, rel=0.05)
    assert bool((one["blocks.0.attention_norm.weight"] == 1).all())


def test_bfloat16_policies_run_forward_and_backward():
    model = model_of().model_copy(update={"dtype": "bfloat16"})
    module = ADAPTER.build(model, None, device=CPU, seed=0)
    pack = without_routes(pack_of(WANTED, SAMPLED))
    output = ADAPTER.forward(module, pack, temperature=1.0)
    output.logprobs_T.sum().backward()
    assert output.logprobs_T.dtype == torch.float32
    reference = ADAPTER.forward(policy(), pack, temperature=1.0).logprobs_T
    assert (output.logprobs_T - reference).detach().abs().max() < 0.3
    assert all(p.dtype == p.grad.dtype == torch.bfloat16 for p in module.parameters())
