"""A policy on a GPU against the same policy on the CPU, on packs with and without replay."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from miles_olmo.policy.adapter import adapter_for
from tests.policy.policies import SHAPES, generate, model_of, pack_of, requests, train_of
from tests.policy.policies import engine as engine_of

FAMILIES = sorted(SHAPES)


def module_on(device, name, dtype="float32", recompute="none"):
    model = model_of(**SHAPES[name]).model_copy(update={"dtype": dtype})
    adapter = adapter_for(model.family)
    return adapter, adapter.build(model, train_of(recompute), device=device, seed=0)


def pack_for(name, longest=40):
    engine = engine_of(**SHAPES[name])
    wanted = requests(12, longest=longest)
    return pack_of(wanted, generate(engine, wanted))


def results(adapter, module, pack):
    """Logprobs and gradients of a weighted sum of them, on the CPU in float32."""
    module.zero_grad()
    output = adapter.forward(module, pack, temperature=1.0)
    (output.logprobs_T * pack.advantages_T).sum().backward()
    gradients = {
        name: parameter.grad.float().cpu()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return output.logprobs_T.detach().cpu(), gradients


def relative(got, expected):
    return float((got - expected).norm() / expected.norm().clamp(min=1e-12))


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_equals_the_cpu(cuda, name):
    pack = pack_for(name)
    logprobs, gradients = results(*module_on(torch.device("cpu"), name), pack)
    got, got_gradients = results(*module_on(cuda, name), pack.to(cuda))
    assert (got - logprobs).abs().max() <= 1e-5
    assert got_gradients.keys() == gradients.keys()
    for tensor, gradient in gradients.items():
        assert relative(got_gradients[tensor], gradient) <= 1e-4, tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_equals_the_cpu_within_rounding(cuda, name):
    pack = pack_for(name)
    logprobs, _ = results(*module_on(torch.device("cpu"), name), pack)
    rounded, _ = results(*module_on(torch.device("cpu"), name, "bfloat16"), pack)
    got, gradients = results(*module_on(cuda, name, "bfloat16"), pack.to(cuda))
    yardstick = float((rounded - logprobs).abs().mean())
    assert float((got - logprobs).abs().mean()) <= 1.5 * yardstick + 1e-4
    assert all(bool(torch.isfinite(g).all()) for g in gradients.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_pack_gives_the_same_bits_again(cuda, dtype):
    torch.use_deterministic_algorithms(True)
    try:
        adapter, module = module_on(cuda, "quickstart", dtype)
        pack = pack_for("quickstart").to(cuda)
        first, gradients = results(adapter, module, pack)
        for _ in range(3):
            again, again_gradients = results(adapter, module, pack)
            assert torch.equal(again, first)
            assert all(torch.equal(g, again_gradients[n]) for n, g in gradients.items())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recompute_changes_no_bit(cuda, dtype):
    pack = pack_for("quickstart").to(cuda)
    torch.use_deterministic_algorithms(True)
    try:
        plain = results(*module_on(cuda, "quickstart", dtype), pack)
        again = results(*module_on(cuda, "quickstart", dtype, recompute="block"), pack)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(gradient, again[1][name]) for name, gradient in plain[1].items())


@pytest.mark.parametrize("replay", [True, False])
def test_a_pass_never_waits_for_the_device_inside_its_layers(cuda, replay):
    """What waits is counted, and does not grow with the number of layers."""
    waits = []
    for layers in (1, 6):
        model = model_of(num_layers=layers).model_copy(update={"dtype": "bfloat16"})
        adapter = adapter_for(model.family)
        module = adapter.build(model, train_of(), device=cuda, seed=0)
        engine = engine_of(num_layers=layers)
        wanted = requests(6)
        pack = pack_of(wanted, generate(engine, wanted)).to(cuda)
        pack = pack if replay else replace(pack, routes_TLK=None)
        results(adapter, module, pack)
        module.zero_grad()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                output = adapter.forward(module, pack, temperature=1.0)
                output.logprobs_T.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen = [w for w in caught if "synchroniz" in str(w.message)]
        waits.append([f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in seen])
    assert len(waits[0]) == len(waits[1]), waits
