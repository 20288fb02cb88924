"""Engine and trainer agree on every bit of every trained token (CPU, float32, one thread)."""

from __future__ import annotations

import pytest
import torch

from tests.policy.policies import ADAPTER, SHAPES, engine, generate, pack_of, policy, requests


def largest_difference(module, pack) -> float:
    logprobs_T = ADAPTER.forward(module, pack, temperature=1.0).logprobs_T
    return float((logprobs_T - pack.behaviour_logprobs_T)[pack.mask_T].detach().abs().max())


@pytest.mark.parametrize("name", SHAPES)
def test_engine_logprobs_equal_the_trainers(name):
    changes = SHAPES[name]
    wanted = requests(12)
    sampled = generate(engine(**changes), wanted)
    for recompute in ("none", "block"):
        module = policy(recompute=recompute, **changes)
        for share_prefixes in (None, False, True):
            pack = pack_of(wanted, sampled, share_prefixes=share_prefixes)
            assert largest_difference(module, pack) == 0.0
            pack = pack_of(wanted, sampled, replay=False, share_prefixes=share_prefixes)
            assert largest_difference(module, pack) == 0.0


@pytest.mark.parametrize("name", ["quickstart", "sigmoid, normalised", "all together"])
def test_neither_batch_nor_pack_composition_changes_a_bit(name):
    changes = SHAPES[name]
    wanted = requests(10, seed=3)
    together = generate(engine(**changes), wanted)
    few = generate(engine(max_batch_size=3, **changes), wanted)
    alone = generate(engine(max_batch_size=1, **changes), wanted)
    for one, two, three in zip(together, few, alone, strict=True):
        assert one.token_ids == two.token_ids == three.token_ids
        assert one.logprobs == two.logprobs == three.logprobs
        assert (one.routes == two.routes).all() and (one.routes == three.routes).all()
    module = policy(**changes)
    for indices in ([0], [9, 1, 4], [5, 4, 3, 2, 1, 0], [7, 8]):
        pack = pack_of(wanted, together, indices=indices)
        assert largest_difference(module, pack) == 0.0


@pytest.mark.parametrize("window", [None, 1, 16, 64, 65, 150])
def test_long_sequences_agree_across_padding_and_key_blocks(window):
    changes = {}
    if window is not None:
        kinds = ["full_attention", "sliding_attention"]
        changes = {"layer_types": kinds, "sliding_window": window}
    wanted = requests(2, seed=5, longest=2, max_tokens=200, ignore_stop=True)
    sampled = generate(engine(**changes), wanted)
    module = policy(**changes)
    assert largest_difference(module, pack_of(wanted, sampled)) == 0.0
    assert largest_difference(module, pack_of(wanted, sampled, indices=[1])) == 0.0


def test_dense_layers_have_rows_of_zeros_and_no_statistics():
    changes = SHAPES["all together"]
    wanted = requests(4, seed=2)
    sampled = generate(engine(**changes), wanted)
    for sequence in sampled:
        assert sequence.routes.shape[1:] == (4, 2)
        assert not sequence.routes[:, [0, 2]].any()
        assert (sequence.routes[:, [1, 3], 0] != sequence.routes[:, [1, 3], 1]).all()
    pack = pack_of(wanted, sampled)
    router = ADAPTER.forward(policy(**changes), pack, temperature=1.0).router
    assert router.counts_LE.shape == (2, 8) and router.native_mismatch_L.tolist() == [0, 0]
    assert router.num_replayed == router.num_required


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_tempered_logprobs_agree(temperature):
    wanted = requests(4, seed=6, temperature=temperature)
    sampled = generate(engine(), wanted)
    pack = pack_of(wanted, sampled)
    logprobs_T = ADAPTER.forward(policy(), pack, temperature=temperature).logprobs_T
    assert torch.equal(logprobs_T[pack.mask_T], pack.behaviour_logprobs_T[pack.mask_T])
