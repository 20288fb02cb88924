"""Auxiliary losses: values by hand, and independence of packing where that is promised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.algo.router_losses import (
    RouterCounts,
    counts_of_routes,
    load_balancing_loss,
    z_loss,
)
from miles_olmo.policy.family import RouterStatistics
from tests.policy.policies import (
    ADAPTER,
    engine,
    generate,
    pack_of,
    policy,
    requests,
    without_routes,
)

WANTED = requests(8, seed=1, longest=24)
SAMPLED = generate(engine(), WANTED)


def statistics(counts, probability_sums, z_sums, positions) -> RouterStatistics:
    return RouterStatistics(
        counts_LE=torch.tensor(counts),
        probability_sums_LE=torch.tensor(probability_sums),
        z_sums_L=torch.tensor(z_sums),
        num_positions=positions,
        num_required=positions,
        num_replayed=0,
        native_mismatch_L=torch.zeros(len(counts), dtype=torch.int64),
    )


def test_a_balanced_router_has_loss_one_and_a_collapsed_one_the_number_of_experts():
    balanced = statistics([[2.0, 2.0]], [[2.0, 2.0]], [4.0], 4)
    collapsed = statistics([[4.0, 0.0]], [[4.0, 0.0]], [4.0], 4)
    for scope in ("per_pack", "global"):
        for one, value in ((balanced, 1.0), (collapsed, 2.0)):
            batch = RouterCounts(one.counts_LE, one.num_positions)
            assert float(load_balancing_loss(one, batch, scope)) == pytest.approx(value)


def test_two_packs_by_hand():
    first = statistics([[4.0, 0.0]], [[3.0, 1.0]], [8.0], 4)
    second = statistics([[1.0, 1.0]], [[1.0, 1.0]], [2.0], 2)
    batch = RouterCounts(first.counts_LE, 4) + RouterCounts(second.counts_LE, 2)
    per_pack = sum(load_balancing_loss(pack, batch, "per_pack") for pack in (first, second))
    # 4/6 * 2 * (1 * 3/4) + 2/6 * 2 * (1/2 * 1/2 + 1/2 * 1/2)
    assert float(per_pack) == pytest.approx(4 / 6 * 1.5 + 2 / 6 * 1.0)
    whole = sum(load_balancing_loss(pack, batch, "global") for pack in (first, second))
    # shares 5/6 and 1/6, means 4/6 and 2/6
    assert float(whole) == pytest.approx(2 * (5 / 6 * 4 / 6 + 1 / 6 * 2 / 6))
    assert float(z_loss(first, 6) + z_loss(second, 6)) == pytest.approx(10 / 6)


def auxiliary(module, packs, batch):
    """Global load balancing plus z-loss over the packs, each backpropagated by itself."""
    module.zero_grad()
    total = 0.0
    for pack in packs:
        router = ADAPTER.forward(module, pack, temperature=1.0).router
        loss = load_balancing_loss(router, batch, "global") + z_loss(router, batch.num_positions)
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("replay", [True, False])
@settings(max_examples=4, deadline=None)
@given(order=st.permutations(range(8)), cut=st.integers(1, 7))
def test_global_losses_do_not_depend_on_packing(router, replay, order, cut):
    module = policy(router=router)
    whole = [pack_of(WANTED, SAMPLED, replay=replay)]
    parts = (order[:cut], order[cut:])
    packs = [pack_of(WANTED, SAMPLED, indices=part, replay=replay) for part in parts]
    found = []
    for batch_packs in (whole, packs):
        batch = ADAPTER.count_experts(module, batch_packs)
        found.append(auxiliary(module, batch_packs, batch))
    (loss, expected), (split_loss, split) = found
    assert split_loss == pytest.approx(loss, rel=1e-5)
    for name, gradient in expected.items():
        assert (split[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name


def test_counts_of_routes_are_those_of_the_forward_pass():
    pack = pack_of(WANTED, SAMPLED)
    module = policy()
    counted = ADAPTER.count_experts(module, [pack])
    known = counts_of_routes(pack.routes_TLK, 8)
    assert torch.equal(counted.counts_LE, known.counts_LE)
    assert counted.num_positions == known.num_positions
    native = ADAPTER.count_experts(module, [without_routes(pack)])
    assert native.num_positions == pack.num_tokens - len(pack.document_lengths)


def test_auxiliary_losses_reach_the_router_but_not_the_shares():
    pack = replace(pack_of(WANTED, SAMPLED), routes_TLK=None)
    module = policy(num_layers=1)
    batch = ADAPTER.count_experts(module, [pack])
    auxiliary(module, [pack], batch)
    assert module.router.weight.grad.abs().max() > 0
    assert module.lm_head.w_out.weight.grad is None or not module.lm_head.w_out.weight.grad.any()
