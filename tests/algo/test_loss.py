"""The policy-gradient loss: hand-computed cases, bounds, and independence of the packing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_olmo.algo.kl import kl_estimate
from miles_olmo.algo.loss import policy_loss
from miles_olmo.algo.loss_sums import LossSums
from miles_olmo.algo.metrics import training_metrics
from miles_olmo.algo.normaliser import LossNormaliser
from miles_olmo.algo.pack import Pack
from miles_olmo.base.errors import TrainingError
from miles_olmo.manifest.models import Algorithm, Clip, ImportanceSampling, Kl

from .batches import Batch, batches, partitions

EVERYTHING = Algorithm(
    clip=Clip(low=0.2, high=0.28, dual=3.0),
    kl=Kl(coefficient=0.1, estimator="k3"),
    importance_sampling=ImportanceSampling(enabled=True, cap=1.5),
)


def _one_token(
    *, ratio: float, advantage: float, tis: float = 1.0, reference: float = 0.0
) -> tuple[Pack, torch.Tensor]:
    """A pack of one document of two tokens, the second trained; old logprob -1."""
    old = torch.tensor([0.0, -1.0])
    pack = Pack(
        ids_T=torch.tensor([1, 2]),
        document_lengths=(2,),
        sequence_indices=(0,),
        mask_T=torch.tensor([False, True]),
        advantages_T=torch.full((2,), advantage),
        behaviour_logprobs_T=torch.tensor([0.0, -1.0 - math.log(tis)]),
        routes_TLK=None,
        old_logprobs_T=old,
        reference_logprobs_T=torch.tensor([0.0, -1.0 + reference]),
    )
    logprobs_T = torch.tensor([0.0, -1.0 + math.log(ratio)], requires_grad=True)
    return pack, logprobs_T


def _loss_of(algorithm: Algorithm = Algorithm(), **token: float) -> tuple[float, float, LossSums]:
    """Loss, gradient by the token's logprob, and sums of a one-token batch."""
    pack, logprobs_T = _one_token(**token)
    normaliser = LossNormaliser.of_packs([pack], constant_length=10)
    loss, sums = policy_loss(pack, logprobs_T, algorithm, normaliser)
    loss.backward()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad[0] == 0
    return loss.item(), logprobs_T.grad[1].item(), sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.56, 0.0),  # stopped by the upper clip
        (0.5, 2.0, -1.0, -1.0),  # the clip never stops a recovery
        (0.5, -2.0, 1.6, 0.0),  # stopped by the lower clip
        (1.5, -2.0, 3.0, 3.0),
        (5.0, -2.0, 10.0, 10.0),  # without a dual clip
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, gradient):
    value, slope, sums = _loss_of(ratio=ratio, advantage=advantage)
    assert value == pytest.approx(loss, rel=1e-5)
    assert slope == pytest.approx(gradient, rel=1e-5)
    assert sums.clipped_low == (ratio == 0.5 and advantage < 0)
    assert sums.clipped_high == (ratio == 1.5 and advantage > 0)


def test_dual_clip_by_hand():
    dual = Algorithm(clip=Clip(dual=3.0))
    value, slope, sums = _loss_of(dual, ratio=5.0, advantage=-2.0)
    assert (value, slope, sums.clipped_dual) == (pytest.approx(6.0), 0.0, 1.0)


@given(st.floats(0.01, 50), st.floats(-5, 5), st.floats(1.1, 10))
def test_dual_clip_bounds_the_loss_of_negative_advantages(ratio, advantage, dual):
    value, _, _ = _loss_of(Algorithm(clip=Clip(dual=dual)), ratio=ratio, advantage=advantage)
    plain, _, _ = _loss_of(ratio=ratio, advantage=advantage)
    if advantage < 0:
        assert value <= dual * -advantage * (1 + 1e-5)
    else:
        assert value == plain


def test_importance_sampling_by_hand():
    tis = Algorithm(importance_sampling=ImportanceSampling(enabled=True, cap=2.0))
    value, slope, sums = _loss_of(tis, ratio=1.1, advantage=2.0, tis=1.5)
    assert (value, slope) == (pytest.approx(-3.3, rel=1e-5), pytest.approx(-3.3, rel=1e-5))
    assert sums.tis_clipped == 0
    value, _, sums = _loss_of(tis, ratio=1.1, advantage=2.0, tis=40.0)
    assert (value, sums.tis_weight, sums.tis_clipped) == (pytest.approx(-4.4, rel=1e-5), 2.0, 1.0)


@given(st.floats(0.001, 1000), st.floats(0.5, 5))
def test_importance_weights_never_exceed_the_cap(weight, cap):
    tis = Algorithm(importance_sampling=ImportanceSampling(enabled=True, cap=cap))
    value, _, _ = _loss_of(tis, ratio=1.0, advantage=-1.0, tis=weight)
    assert value == pytest.approx(min(weight, cap), rel=1e-4)


def test_importance_sampling_without_the_trainers_logprobs_is_refused():
    pack, logprobs_T = _one_token(ratio=1.0, advantage=1.0)
    normaliser = LossNormaliser.of_packs([pack], constant_length=1)
    with pytest.raises(TrainingError, match="E314"):
        policy_loss(replace(pack, old_logprobs_T=None), logprobs_T, EVERYTHING, normaliser)


def test_a_kl_penalty_without_a_reference_is_refused():
    pack, logprobs_T = _one_token(ratio=1.0, advantage=1.0)
    normaliser = LossNormaliser.of_packs([pack], constant_length=1)
    with pytest.raises(TrainingError, match="E314"):
        policy_loss(replace(pack, reference_logprobs_T=None), logprobs_T, EVERYTHING, normaliser)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    # d = log reference - log policy = 0.5; k1 = -d, k2 = d*d/2, k3 = exp(d) - 1 - d
    [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5))],
)
def test_kl_penalty_by_hand(estimator, value, gradient):
    algorithm = Algorithm(kl=Kl(coefficient=0.1, estimator=estimator))
    loss, slope, sums = _loss_of(algorithm, ratio=1.0, advantage=0.0, reference=0.5)
    assert loss == pytest.approx(0.1 * value, rel=1e-5)
    assert slope == pytest.approx(0.1 * gradient, rel=1e-5)
    assert sums.kl_loss == pytest.approx(value, rel=1e-5)


@given(st.floats(-200, 0), st.floats(-200, 0))
def test_kl_estimates_stay_in_their_bounds(a, b):
    policy_N, other_N = torch.tensor([a]), torch.tensor([b])
    for estimator, low in (("k1", -10.0), ("k2", 0.0), ("k3", 0.0)):
        value = kl_estimate(policy_N, other_N, estimator).item()
        assert low <= value <= 10.0
    assert kl_estimate(policy_N, policy_N, "k3").item() == 0.0


def test_aggregations_by_hand():
    # sequences of 1 and 3 trained tokens and one masked out; loss of a token = -advantage
    packs = [
        _ones(0, advantage=1.0, trained=1),
        _ones(1, advantage=2.0, trained=3),
        _ones(2, advantage=9.0, trained=0),
    ]
    normaliser = LossNormaliser.of_packs(packs, constant_length=5)
    expected = {"token": -7 / 4, "sequence": -3 / 2, "constant": -7 / 15}
    for aggregation, value in expected.items():
        algorithm = Algorithm(aggregation=aggregation)
        total = sum(
            policy_loss(pack, pack.behaviour_logprobs_T, algorithm, normaliser)[0].item()
            for pack in packs
        )
        assert total == pytest.approx(value, rel=1e-6)


def _ones(index: int, *, advantage: float, trained: int) -> Pack:
    return Pack(
        ids_T=torch.zeros(5, dtype=torch.int64),
        document_lengths=(5,),
        sequence_indices=(index,),
        mask_T=torch.arange(5).sub(1).ge(0) & torch.arange(5).le(trained),
        advantages_T=torch.full((5,), advantage),
        behaviour_logprobs_T=torch.full((5,), -1.0),
        routes_TLK=None,
    )


def _run(batch: Batch, packs: list[list[int]], algorithm: Algorithm):
    """Loss, gradient by every logprob and sums, one backward per pack."""
    built = [batch.pack(members) for members in packs]
    normaliser = LossNormaliser.of_packs([pack for pack, _ in built], constant_length=8)
    for logprobs_T in batch.current:
        logprobs_T.grad = None
    total, sums = 0.0, LossSums()
    for pack, logprobs_T in built:
        loss, pack_sums = policy_loss(pack, logprobs_T, algorithm, normaliser)
        loss.backward()
        total += loss.item()
        sums = sums + pack_sums
    gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in batch.current]
    return total, torch.cat(gradients), sums


@settings(max_examples=60)
@given(st.data(), batches(), st.sampled_from(["token", "sequence", "constant"]))
def test_loss_gradient_and_metrics_do_not_depend_on_packing(data, batch, aggregation):
    algorithm = EVERYTHING.model_copy(update={"aggregation": aggregation})
    count = len(batch.sequences)
    base, base_gradient, base_sums = _run(batch, [list(range(count))], algorithm)
    packs = data.draw(partitions(count))
    loss, gradient, sums = _run(batch, packs, algorithm)
    scale = max(abs(base), float(base_gradient.abs().max()), 1e-3)
    assert abs(loss - base) <= 1e-5 * scale
    assert float((gradient - base_gradient).abs().max()) <= 1e-5 * scale
    assert training_metrics(sums) == pytest.approx(training_metrics(base_sums), rel=1e-5, abs=1e-6)


@settings(max_examples=40)
@given(batches())
def test_the_loss_has_no_gradient_outside_the_mask(batch):
    _run(batch, [[index] for index in range(len(batch.sequences))], EVERYTHING)
    for sequence, logprobs_T in zip(batch.sequences, batch.current, strict=True):
        if logprobs_T.grad is not None:
            assert not logprobs_T.grad[~sequence.mask_T].any()


@settings(max_examples=40)
@given(batches())
def test_reported_loss_is_the_loss(batch):
    loss, _, sums = _run(batch, [[index] for index in range(len(batch.sequences))], EVERYTHING)
    metrics = training_metrics(sums)
    assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert metrics["train/loss"] == pytest.approx(
        metrics["train/pg_loss"] + 0.1 * metrics["train/kl_loss"], rel=1e-5, abs=1e-6
    )
    assert 0 < metrics["train/ess_ratio"] <= 1 + 1e-6


def test_identical_engine_and_trainer_show_exactly_no_mismatch():
    pack, logprobs_T = _one_token(ratio=1.0, advantage=1.0)
    normaliser = LossNormaliser.of_packs([pack], constant_length=1)
    _, sums = policy_loss(pack, logprobs_T, Algorithm(), normaliser)
    metrics = training_metrics(sums)
    assert metrics["train/train_rollout_logprob_abs_diff_max"] == 0.0
    assert metrics["train/train_rollout_kl"] == 0.0
    assert metrics["train/ess_ratio"] == 1.0
    assert metrics["train/ratio"] == 1.0


def test_a_nan_logprob_names_its_sequence():
    packs = [_ones(0, advantage=1.0, trained=2), _ones(1, advantage=1.0, trained=2)]
    normaliser = LossNormaliser.of_packs(packs, constant_length=1)
    logprobs_T = packs[1].behaviour_logprobs_T.clone()
    logprobs_T[2] = math.nan
    with pytest.raises(TrainingError) as caught:
        policy_loss(packs[1], logprobs_T, Algorithm(), normaliser)
    assert caught.value.code == "E315"
    assert caught.value.details["sequences"] == [1]


def test_a_nan_outside_the_mask_does_not_reach_the_loss():
    pack = _ones(0, advantage=1.0, trained=2)
    logprobs_T = pack.behaviour_logprobs_T.clone()
    logprobs_T[4] = math.nan
    normaliser = LossNormaliser.of_packs([pack], constant_length=1)
    loss, _ = policy_loss(pack, logprobs_T, Algorithm(), normaliser)
    assert math.isfinite(loss.item())


@settings(max_examples=40)
@given(st.data(), batches())
def test_weights_are_zero_outside_the_mask_and_add_up_over_packs(data, batch):
    packs = [batch.pack(p)[0] for p in data.draw(partitions(len(batch.sequences)))]
    normaliser = LossNormaliser.of_packs(packs, constant_length=8)
    for aggregation in ("token", "sequence"):
        weights = [normaliser.weights_T(pack, aggregation) for pack in packs]
        assert all(
            not weights_T[~pack.mask_T].any()
            for pack, weights_T in zip(packs, weights, strict=True)
        )
        assert sum(weights_T.sum().item() for weights_T in weights) == pytest.approx(1, rel=1e-5)


def test_a_batch_without_trained_tokens_is_refused():
    with pytest.raises(TrainingError, match="E313"):
        LossNormaliser.of_packs([_ones(0, advantage=1.0, trained=0)], constant_length=1)
