"""Computing equal prefixes once changes no logprob, and no loss, statistic or gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from miles_olmo.algo.pack_rows import pack_rows
from miles_olmo.policy.attention import attend_documents, gather_rows, lay_out
from miles_olmo.policy.numerics import EXACT, FAST
from miles_olmo.wire.generation import SampledSequence, SamplingRequest
from tests.policy.policies import ADAPTER, SHAPES, engine, generate, pack_of, policy

SHARINGS = (None, False, True)
SHAPE_NAMES = ["quickstart", "grouped queries", "windows shorter than documents", "all together"]


def groups(num_prompts: int, samples: int, seed: int = 0) -> list[SamplingRequest]:
    """Requests as a step has them: several samples of each prompt."""
    random = np.random.default_rng(seed)
    prompts = [
        tuple(int(token) for token in random.integers(0, 48, random.integers(1, 20)))
        for _ in range(num_prompts)
    ]
    return [
        SamplingRequest(prompt, 8, 1.0, seed=number, stop_token_ids=(2,))
        for number, prompt in enumerate(prompt for prompt in prompts for _ in range(samples))
    ]


def results(module, pack):
    """Logprobs, entropy, statistics, and gradients of a loss with auxiliary terms."""
    module.zero_grad()
    output = ADAPTER.forward(module, pack, temperature=1.0)
    router = output.router
    loss = (output.logprobs_T * pack.advantages_T)[pack.mask_T].sum() / 50
    loss = loss + output.entropy_T[pack.mask_T].sum() / 100
    weights_E = torch.arange(router.probability_sums_LE.shape[1])
    loss = loss + (router.probability_sums_LE * weights_E).sum() / 1000
    (loss + router.z_sums_L.sum() / 1000).backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return output, gradients


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("name", SHAPE_NAMES)
def test_sharing_changes_no_logprob_and_gradients_by_rounding_only(name, replay, recompute):
    wanted = groups(4, 4)
    sampled = generate(engine(**SHAPES[name]), wanted)
    module = policy(recompute=recompute, **SHAPES[name])
    packs = [pack_of(wanted, sampled, replay=replay, share_prefixes=how) for how in SHARINGS]
    assert packs[2].num_rows < 0.7 * packs[0].num_tokens
    (expected, wanted_gradients), *others = [results(module, pack) for pack in packs]
    for output, gradients in others:
        assert torch.equal(output.logprobs_T, expected.logprobs_T)
        assert torch.equal(output.entropy_T, expected.entropy_T)
        got, want = output.router, expected.router
        assert torch.equal(got.counts_LE, want.counts_LE)
        assert torch.equal(got.native_mismatch_L, want.native_mismatch_L)
        assert (got.num_positions, got.num_required) == (want.num_positions, want.num_required)
        assert got.num_replayed == want.num_replayed
        assert torch.allclose(got.probability_sums_LE, want.probability_sums_LE, rtol=1e-5)
        assert torch.allclose(got.z_sums_L, want.z_sums_L, rtol=1e-5)
        assert gradients.keys() == wanted_gradients.keys()
        for tensor, gradient in wanted_gradients.items():
            assert (gradients[tensor] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, tensor


def test_mismatches_count_every_token_that_shares_the_row():
    prompt = tuple(range(3, 13))
    wanted = [SamplingRequest(prompt, 4, 1.0, seed=n, stop_token_ids=()) for n in range(3)]
    sampled = generate(engine(), wanted)
    pack = pack_of(wanted, sampled)
    routes = pack.routes_TLK.clone()
    firsts = torch.tensor(pack.document_lengths).cumsum(0) - torch.tensor(pack.document_lengths)
    routes[firsts] = (routes[firsts] + 1) % 8  # the same other experts in every document
    found = []
    for share in (False, True):
        rows = pack_rows(pack.ids_T, routes, pack.document_lengths, share_prefixes=share)
        changed = replace(pack, routes_TLK=routes, row_T=rows[0], token_R=rows[1])
        found.append(ADAPTER.forward(policy(), changed, temperature=1.0).router)
    plain, shared = found
    assert plain.native_mismatch_L.tolist() == shared.native_mismatch_L.tolist()
    assert plain.native_mismatch_L[0] % 3 == 0 and plain.native_mismatch_L[0] > 0


def test_equal_documents_with_different_routes_are_not_shared():
    wanted = [SamplingRequest(tuple(range(3, 13)), 4, 1.0, seed=0, stop_token_ids=())] * 2
    sampled = generate(engine(), [wanted[0]]) * 2
    routes = sampled[0].routes.copy()
    routes[0] = (routes[0] + 1) % 8
    other = replace(sampled[0], routes=routes)
    pack = pack_of(wanted, [sampled[0], other], share_prefixes=True)
    assert pack.num_rows == pack.num_tokens - 2
    alone = pack_of(wanted[:1], [other])
    length = alone.num_tokens
    got = ADAPTER.forward(policy(), pack, temperature=1.0).logprobs_T
    expected = ADAPTER.forward(policy(), alone, temperature=1.0).logprobs_T
    assert torch.equal(got[length:], expected)
    assert not torch.equal(got[:length], expected)


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (1, 2), (2,), (1, 40, 1)])
def test_documents_of_one_token_are_no_input(lengths):
    total = sum(lengths)
    wanted, sampled = [], []
    for number, length in enumerate(lengths):
        prompt = max(1, length - 1)
        answer = (7,) * (length - prompt)
        wanted.append(SamplingRequest((5,) * prompt, 1, 1.0, seed=number, stop_token_ids=()))
        rows = np.zeros((length - 1, 2, 2), dtype=np.int16)
        rows[..., 1] = 1
        sampled.append(SampledSequence(answer, (0.0,) * len(answer), rows, "length"))
    outputs = []
    for share in SHARINGS:
        pack = pack_of(wanted, sampled, share_prefixes=share)
        assert pack.num_tokens == total
        outputs.append(ADAPTER.forward(policy(), pack, temperature=1.0))
    for output in outputs[1:]:
        assert torch.equal(output.logprobs_T, outputs[0].logprobs_T)
        assert output.router.num_positions == outputs[0].router.num_positions
        assert torch.equal(output.router.counts_LE, outputs[0].router.counts_LE)


@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("rules", [EXACT, FAST])
def test_documents_attend_through_shared_rows(rules, window):
    lengths = (9, 30, 9, 2)
    ids = [*range(9), *range(5), *range(20, 45), *range(9), 0, 1]
    row_T, token_R = pack_rows(torch.tensor(ids), None, lengths, share_prefixes=True)
    assert len(token_R) == 8 + 24
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(token_R), heads, 16) for heads in (4, 2, 2)]
    shared = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    cpu = torch.device("cpu")
    layout = lay_out(lengths, rules, cpu, (row_T, token_R))
    got = attend_documents(*shared, layout, rules, window)
    inputs = row_T >= 0
    whole = [x[row_T.clamp(min=0)] for x in shared]
    full = attend_documents(*whole, lay_out(lengths, rules, cpu), rules, window)
    assert torch.allclose(got[row_T[inputs]], full[inputs], atol=1e-6)
    assert layout.positions_T[row_T[inputs]].tolist() == [
        position for length in lengths for position in range(length - 1)
    ]
    weights = torch.randn(got.shape, generator=generator)
    first = torch.zeros(len(ids), dtype=torch.bool)
    first[token_R] = True
    gradients = torch.autograd.grad((got * weights).sum(), shared)
    wanted = torch.autograd.grad((full[first] * weights).sum(), shared)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert torch.allclose(gradient, want, atol=1e-5)


def test_gradients_of_a_row_taken_often_are_summed_in_float32():
    row = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    gather_rows(row, torch.zeros(1000, dtype=torch.int64)).float().sum().backward()
    assert row.grad.tolist() == [[1000.0] * 4]  # bfloat16 sums would stop at 256
