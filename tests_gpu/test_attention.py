"""Attention of packs on a GPU against per-document attention in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from miles_olmo.policy.attention import attend_documents, lay_out
from miles_olmo.policy.numerics import rules_for

LENGTHS = (5, 700, 1, 16, 333, 2048, 64)
WINDOWS = [None, 1, 6, 128, 5000]


def tensors(dtype, device, heads=8, kv_heads=2, width=64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, width), *[(sum(LENGTHS), kv_heads, width)] * 2]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.to(device, dtype).requires_grad_() for x in drawn]


def one_by_one(q_THD, k_TGD, v_TGD, window):
    """Every document by itself in float64, `[T, H * D]`."""
    heads, kv_heads = q_THD.shape[1], k_TGD.shape[1]
    k_TGD, v_TGD = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k_TGD, v_TGD))
    outputs, start = [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        q, k, v = (x[rows].double().transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
        positions = torch.arange(length, device=q.device)
        distance = positions[:, None] - positions
        visible = (distance >= 0) & (distance < (window or length))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        outputs.append(out[0].transpose(0, 1).reshape(length, -1))
        start += length
    return torch.cat(outputs)


def relative(got, expected):
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 5e-3)])
def test_documents_attend_to_themselves_only(cuda, dtype, bound, window):
    rules = rules_for(cuda, dtype)
    assert rules.attention == ("varlen" if dtype == "bfloat16" else "fused")
    inputs = tensors(getattr(torch, dtype), cuda)
    layout = lay_out(LENGTHS, rules, cuda)
    got = attend_documents(*inputs, layout, rules, window)
    expected = one_by_one(*inputs, window)
    assert relative(got, expected) <= bound

    weights = torch.randn(got.shape, device=cuda)
    gradients = torch.autograd.grad((got.float() * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, want in zip(gradients, wanted, strict=True):
        assert relative(gradient, want) <= bound


@pytest.mark.parametrize("window", [None, 128])
def test_one_call_rounds_like_attention_of_each_document(cuda, window):
    """Within bfloat16: the packed call against torch's own attention of one document at a time."""
    rules = rules_for(cuda, "bfloat16")
    q, k, v = tensors(torch.bfloat16, cuda, kv_heads=8)
    got = attend_documents(q, k, v, lay_out(LENGTHS, rules, cuda), rules, window)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        alone = attend_documents(
            q[rows], k[rows], v[rows], lay_out((length,), rules, cuda), rules, window
        )
        assert torch.equal(got[rows], alone), length
        start += length
