"""One step of learning on a real policy: invariances, and what stops it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from miles_olmo.base.errors import TrainingError
from miles_olmo.grpo.batch import groups_with_signal, update_batch
from miles_olmo.grpo.learner import LARGEST_DIFFERENCE, Learner
from miles_olmo.grpo.shares import share_out
from miles_olmo.manifest.models import Manifest
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.generation import CoreEngineModel
from miles_olmo.policy.optimizer import PolicyOptimizer
from miles_olmo.wire.generation import SamplingRequest
from miles_olmo.wire.trajectory import ScoredGroup, Segment, Trajectory

CONFIGURATION = {
    "version": 1,
    "name": "learner",
    "model": {
        "shape": {
            "vocab_size": 24,
            "hidden_size": 32,
            "num_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "expert_hidden_size": 16,
            "shared_expert_hidden_size": 16,
            "max_position_embeddings": 64,
            "initializer_std": 0.2,
        }
    },
    "data": {"train": "t", "tokenizer": "k", "eos_token": "e"},
    "rollout": {
        "prompts_per_step": 4,
        "samples_per_prompt": 3,
        "max_prompt_tokens": 12,
        "max_response_tokens": 6,
    },
    "reward": {"verifiers": ["exact_match"]},
    "train": {
        "steps": 4,
        "optimizer": {"learning_rate": 1e-3},
        "packing": {"max_tokens": 64},
    },
}


def manifest(**changes) -> Manifest:
    """The configuration with dotted keys changed."""
    content = Manifest.model_validate(CONFIGURATION).model_dump()
    for key, value in changes.items():
        *tables, name = key.split("__")
        table = content
        for part in tables:
            table = table[part]
        table[name] = value
    return Manifest.model_validate(content)


def learner(settings: Manifest) -> Learner:
    adapter = adapter_for(settings.model.family)
    module = adapter.build(settings.model, settings.train, device=torch.device("cpu"), seed=0)
    return Learner(module, adapter, PolicyOptimizer(module, settings.train.optimizer), settings)


@pytest.fixture(scope="module")
def groups() -> list[ScoredGroup]:
    return sampled_groups()


def sampled_groups(settings: Manifest | None = None) -> list[ScoredGroup]:
    """Four prompts, three sampled answers each, from the policy itself."""
    settings = settings or manifest()
    torch.set_num_threads(1)
    adapter = adapter_for(settings.model.family)
    module = adapter.build(settings.model, None, device=torch.device("cpu"), seed=0)
    engine = CoreEngineModel(module, adapter, max_batch_size=16)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 24, (3 + i,), generator=generator).tolist() for i in range(4)]
    for g, prompt in enumerate(prompts):
        for i in range(3):
            engine.add(f"{g}.{i}", SamplingRequest(tuple(prompt), 3 + i, 1.0, 10 * g + i, (0,)))
    answers = {}
    while engine.num_unfinished:
        answers.update(engine.step())
    return [
        ScoredGroup(
            g,
            f"train:{g}",
            tuple(_trajectory(f"{g}.{i}", prompt, answers[f"{g}.{i}"]) for i in range(3)),
            (1.0, 0.0, 0.5) if g != 2 else (1.0, 1.0, 1.0),
        )
        for g, prompt in enumerate(prompts)
    ]


def _trajectory(sample_id, prompt, answer) -> Trajectory:
    last = np.full((1, *answer.routes.shape[1:]), -1, np.int16)
    rows = np.concatenate([answer.routes.astype(np.int16), last])
    count, response = len(prompt), len(answer.token_ids)
    return Trajectory(
        sample_id,
        (
            Segment(tuple(prompt), "prompt", (False,) * count, None, None, rows[:count]),
            Segment(
                answer.token_ids, "model", (True,) * response, answer.logprobs, 0, rows[count:]
            ),
        ),
        answer.finish_reason,
        "",
    )


def weights(subject: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in subject.module.named_parameters()}


def gradients(subject: Learner) -> dict[str, torch.Tensor]:
    """The gradient of the first update, up to a factor: AdamW's first moment."""
    moments = subject.optimizer.state_tensors()
    return {name: value for name, value in moments.items() if name.startswith("exp_avg.")}


def relative_difference(a: Learner, b: Learner) -> float:
    """Largest difference between two first gradients, relative to the largest gradient."""
    first, second = gradients(a), gradients(b)
    difference = max(float((first[name] - second[name]).abs().max()) for name in first)
    return difference / max(float(value.abs().max()) for value in first.values())


NO_CLIPPING = {"train__optimizer__max_grad_norm": 1e9}


def test_engine_and_trainer_agree_in_every_bit_and_groups_without_signal_are_left_out(groups):
    metrics = learner(manifest()).update(groups)
    assert metrics[LARGEST_DIFFERENCE] == 0.0
    assert metrics["router/replay_coverage"] == 1.0
    assert metrics["router/native_mismatch"] == 0.0
    assert metrics["train/num_groups"] == 3


OLMOE = {"family": "olmoe", "use_head_qk_norm": False, "shared_expert_hidden_size": 0}
KINDS = {
    "olmoe": OLMOE,
    "olmoe, renormalised": {**OLMOE, "normalize_expert_weights": True},
    "dense first layer": {"dense_layers_indices": [0], "dense_hidden_size": 24, "num_layers": 3},
    "everything else": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "attention_gate_type": "elementwise",
        "use_peri_ln": True,
        "embed_norm": True,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_takes_a_step_with_replay(kind):
    shape = dict(KINDS[kind])
    family = shape.pop("family", "olmo3moe")
    model = {"family": family, "shape": {**CONFIGURATION["model"]["shape"], **shape}}
    auxiliary = {"train__load_balancing_loss": {"mode": "global", "coefficient": 0.01}}
    settings = manifest(model=model, **auxiliary)
    groups = sampled_groups(settings)
    subject, before = learner(settings), weights(learner(settings))
    metrics = subject.update(groups)
    assert metrics[LARGEST_DIFFERENCE] == 0.0
    assert metrics["router/replay_coverage"] == metrics["router/replay_applied"] == 1.0
    assert metrics["router/native_mismatch"] == 0.0
    after = weights(subject)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    # Counting the recorded routes of the routed layers is counting what the routers did.
    batch = update_batch(groups_with_signal(groups, settings), settings)
    counted = subject.adapter.count_experts(subject.module, batch.packs)
    (share,) = share_out(batch, 1, shape=settings.model.shape, count_routes=True)
    known = share.route_counts
    assert known is not None and torch.equal(known.counts_LE, counted.counts_LE)
    assert len(known.counts_LE) == len(settings.model.shape.routed_layers)


def test_nothing_changes_without_any_signal(groups):
    subject = learner(manifest())
    before = weights(subject)
    assert subject.update([groups[2]]) == {}
    assert all(torch.equal(before[name], value) for name, value in weights(subject).items())


@pytest.mark.parametrize(
    "change",
    [
        {"train__packing__max_tokens": 18},
        {"train__packing__max_tokens": 512},
        {"train__packing__share_prefixes": False},
        {"train__recompute": "block"},
    ],
)
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_update_does_not_depend_on_packs_or_recompute(groups, change, aggregation):
    common = {
        **NO_CLIPPING,
        "algorithm__aggregation": aggregation,
        "train__load_balancing_loss": {"mode": "global", "coefficient": 0.01},
        "train__z_loss": {"mode": "global", "coefficient": 0.01},
    }
    one, other = learner(manifest(**common)), learner(manifest(**common, **change))
    first, second = one.update(groups), other.update(list(reversed(groups)))
    assert second["train/loss"] == pytest.approx(first["train/loss"], rel=1e-5, abs=1e-7)
    assert second["train/load_balancing_loss"] == pytest.approx(
        first["train/load_balancing_loss"], rel=1e-5
    )
    assert second["train/grad_norm"] == pytest.approx(first["train/grad_norm"], rel=1e-5)
    assert relative_difference(one, other) <= 1e-5


def test_prefixes_that_answers_share_are_computed_once(groups):
    shared = learner(manifest()).update(groups)
    apart = learner(manifest(train__packing__share_prefixes=False)).update(groups)
    documents = sum(len(group.trajectories) for group in groups if len(set(group.rewards)) > 1)
    tokens = apart["train/num_tokens"]
    assert apart["train/computed_ratio"] == 1 - documents / tokens
    assert shared["train/computed_ratio"] < apart["train/computed_ratio"]
    assert shared["train/num_tokens"] == tokens


def test_global_balancing_without_replay_equals_one_pack(groups):
    common = {
        **NO_CLIPPING,
        "train__replay__enabled": False,
        "train__load_balancing_loss": {"mode": "global", "coefficient": 0.1},
    }
    one = learner(manifest(**common, train__packing__max_tokens=512))
    many = learner(manifest(**common, train__packing__max_tokens=18))
    one.update(groups)
    many.update(groups)
    assert relative_difference(one, many) <= 1e-5


def test_a_nan_in_the_policy_stops_the_step_before_the_optimizer_and_names_the_samples(groups):
    subject = learner(manifest())
    with torch.no_grad():
        subject.module.lm_head.w_out.weight[3, 0] = float("nan")
    before = weights(subject)
    with pytest.raises(TrainingError, match="E315") as caught:
        subject.update(groups)
    assert "0.0" in caught.value.details["sample_ids"]
    after = weights(subject)
    assert all(torch.equal(before[n].nan_to_num(7), after[n].nan_to_num(7)) for n in before)
    assert subject.optimizer.num_updates == 0


def test_missing_routes_are_an_error_at_the_first_batch(groups):
    broken = [
        replace(
            group,
            trajectories=tuple(
                replace(t, segments=tuple(replace(s, routes=None) for s in t.segments))
                for t in group.trajectories
            ),
        )
        for group in groups
    ]
    with pytest.raises(TrainingError, match="E316"):
        learner(manifest()).update(broken)


def test_a_reference_policy_pulls_only_when_the_policy_has_moved(groups):
    settings = manifest(algorithm__kl={"coefficient": 0.5, "estimator": "k3"})
    subject = learner(settings)
    reference = learner(settings).module.requires_grad_(False)
    subject.reference = reference
    first = subject.update(groups)
    assert first["train/kl_loss"] == 0.0
    assert subject.update(groups)["train/kl_loss"] > 0.0


def test_importance_sampling_is_neutral_where_engine_and_trainer_agree(groups):
    enabled = {"enabled": True, "cap": 2.0}
    plain = learner(manifest())
    corrected = learner(manifest(algorithm__importance_sampling=enabled))
    first, second = plain.update(groups), corrected.update(groups)
    assert second["train/tis"] == 1.0
    assert second["train/loss"] == first["train/loss"]
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(plain).values(), weights(corrected).values(), strict=True)
    )


def test_several_updates_per_step_share_the_groups_and_score_them_before_the_first(groups):
    enabled = {"enabled": True, "cap": 2.0}
    subject = learner(manifest(train__updates_per_step=3, algorithm__importance_sampling=enabled))
    metrics = subject.update(groups)
    assert subject.optimizer.num_updates == 3
    assert metrics[LARGEST_DIFFERENCE] == 0.0  # scored with the policy that sampled


def test_a_bfloat16_policy_goes_on_from_weights_that_a_warm_up_has_changed(groups):
    subject = learner(manifest(model__dtype="bfloat16"))
    with torch.no_grad():
        for parameter in subject.module.parameters():
            parameter.mul_(2.0)
    subject.take_weights()
    before = weights(subject)
    subject.update(groups)
    largest_step = 2 * 1e-3  # AdamW moves a weight by about the learning rate
    for name, after in weights(subject).items():
        rounding = 2**-7 * float(before[name].float().abs().max())
        assert float((after.float() - before[name].float()).abs().max()) <= largest_step + rounding


def test_equal_steps_give_equal_bits(groups):
    one, other = learner(manifest()), learner(manifest())
    for _ in range(2):
        assert one.update(groups) == other.update(groups)
    assert all(
        torch.equal(a, b)
        for a, b in zip(weights(one).values(), weights(other).values(), strict=True)
    )
