"""Attention of packs and of caches against plain scaled-dot-product attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from miles_olmo.manifest.kernels import attention_kernel
from miles_olmo.policy.attention import attend_cached, attend_documents, lay_out
from miles_olmo.policy.experts import routed_experts_forward
from miles_olmo.policy.numerics import EXACT, FAST, rules_for
from tests.policy.policies import policy

LENGTHS = (5, 70, 1, 16, 33)


def tensors(heads=4, kv_heads=2, width=16, total=sum(LENGTHS)):
    generator = torch.Generator().manual_seed(0)
    shapes = [(total, heads, width), (total, kv_heads, width), (total, kv_heads, width)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def one_document(q, k, v, window=None):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    positions = torch.arange(q.shape[2])
    distance = positions[:, None] - positions
    visible = (distance >= 0) & (distance < (window or len(positions)))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    return out[0].transpose(0, 1).reshape(q.shape[2], -1)


@pytest.mark.parametrize("window", [None, 1, 6, 33, 500])
@pytest.mark.parametrize("rules", [EXACT, FAST])
def test_documents_attend_to_themselves_only(rules, window):
    q, k, v = tensors()
    layout = lay_out(LENGTHS, rules, torch.device("cpu"))
    got = attend_documents(q, k, v, layout, rules, window)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        expected = one_document(q[rows], k[rows], v[rows], window)
        assert torch.allclose(got[rows], expected, atol=1e-5)
        start += length


@pytest.mark.parametrize("window", [None, 1, 12, 13, 40])
@pytest.mark.parametrize("rules", [EXACT, FAST])
def test_a_cached_query_sees_the_same_keys_as_in_its_document(rules, window):
    q, k, v = tensors(total=40)
    expected = one_document(q, k, v, window)
    keys, values = (x.transpose(0, 1)[None].expand(2, -1, -1, -1) for x in (k, v))
    padding = torch.full((2, 2, 8, 16), 9.0)  # must be masked
    keys, values = torch.cat([keys, padding], 2), torch.cat([values, padding], 2)
    lengths = torch.tensor([40, 12])
    got = attend_cached(q[lengths - 1], keys, values, lengths, rules, window)
    assert torch.allclose(got, expected[lengths - 1], atol=1e-5)


@pytest.mark.parametrize(("heads", "width"), [(4, 32), (2, 64), (2, 128)])
def test_cached_queries_have_the_bits_of_any_document_that_holds_them(heads, width):
    q, k, v = tensors(heads=heads, kv_heads=2, width=width, total=700)
    whole = attend_documents(q, k, v, lay_out((700,), EXACT, torch.device("cpu")), EXACT)
    for length in (1, 7, 16, 17, 64, 65, 191, 193, 300, 511, 513, 699):
        padded = EXACT.padded(length)
        keys, values = (x[:padded].transpose(0, 1)[None] for x in (k, v))
        if length == 699:
            keys, values = (F.pad(x, (0, 0, 0, padded - x.shape[2])) for x in (keys, values))
        cached = attend_cached(q[length - 1 : length], keys, values, torch.tensor([length]), EXACT)
        assert torch.equal(cached[0], whole[length - 1]), length
        layout = lay_out((length, 3), EXACT, torch.device("cpu"))
        rows = [torch.cat([x[:length], x[:3]]) for x in (q, k, v)]
        short = attend_documents(*rows, layout, EXACT)
        assert torch.equal(short[length - 1], whole[length - 1]), length


def test_positions_restart_in_every_document():
    layout = lay_out((3, 2), EXACT, torch.device("cpu"))
    assert layout.positions_T.tolist() == [0, 1, 2, 0, 1]


def test_padding_of_expert_groups_changes_neither_result_nor_gradient():
    module = policy()
    block = module.portable_blocks()[0]
    generator = torch.Generator().manual_seed(0)
    found = []
    x = torch.randn(40, 64, generator=generator)
    for min_rows in (16, 1):
        module.zero_grad()
        rows = x.clone().requires_grad_()
        weights, indices, counts, _ = block.routed_experts_router.route(rows, None)
        out = routed_experts_forward(
            block.routed_experts, rows, weights, indices, counts, min_rows=min_rows
        )
        out.square().sum().backward()
        found.append([out, rows.grad, block.routed_experts.w_down.grad.clone()])
    for padded, plain in zip(*found, strict=True):
        assert torch.allclose(padded, plain, atol=1e-5, rtol=1e-5)


def test_experts_match_a_loop_over_tokens():
    block = policy().portable_blocks()[0]
    experts = block.routed_experts
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    weights, indices, counts, _ = block.routed_experts_router.route(x, None)
    got = routed_experts_forward(experts, x, weights, indices, counts, min_rows=16)
    for token in range(6):
        expected = torch.zeros(64)
        for weight, expert in zip(weights[token], indices[token], strict=True):
            up, gate = (experts.w_up_gate[expert] @ x[token]).chunk(2)
            expected = expected + weight * ((up * F.silu(gate)) @ experts.w_down[expert])
        assert torch.allclose(got[token], expected, atol=1e-5)


def flash_stand_in(q, k, v, bounds, bounds_k, longest, longest_k, *, window_size):
    """torch's varlen attention, as its documentation defines it, on a CPU.

    It checks what the kernel only assumes, and masks by (left, right) distance from the query.
    """
    assert bounds.dtype == torch.int32 and torch.equal(bounds, bounds_k)
    assert q.shape[1] == k.shape[1] == v.shape[1]
    lengths = (bounds[1:] - bounds[:-1]).tolist()
    assert sum(lengths) == len(q) == len(k) and max(lengths) == longest == longest_k
    left, right = window_size
    outputs = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        x, y, z = (part[start:end].transpose(0, 1)[None] for part in (q, k, v))
        positions = torch.arange(end - start)
        ahead = positions - positions[:, None]
        visible = (ahead <= right) & (ahead >= -left if left >= 0 else True)
        outputs.append(F.scaled_dot_product_attention(x, y, z, attn_mask=visible)[0])
    return torch.cat(outputs, dim=1).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 6, 33, 500])
def test_one_call_over_all_documents_is_given_their_bounds_and_windows(monkeypatch, window):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash_stand_in)
    rules = rules_for(torch.device("cuda"), "bfloat16")
    q, k, v = tensors()
    layout = lay_out(LENGTHS, rules, torch.device("cpu"))
    assert not layout.groups
    got = attend_documents(q, k, v, layout, rules, window)
    cpu = lay_out(LENGTHS, FAST, torch.device("cpu"))
    assert torch.allclose(got, attend_documents(q, k, v, cpu, FAST, window), atol=1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [("cpu", "bfloat16", "blocked"), ("cuda", "float32", "fused"), ("cuda", "bfloat16", "varlen")],
)
def test_the_policy_uses_the_kernel_that_the_plan_names(device, dtype, kernel):
    assert rules_for(torch.device(device), dtype).attention == kernel
    assert attention_kernel(device, dtype) == kernel
