"""Continuous batching: sampling, stopping, aborting, refreshing weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from miles_olmo.base.errors import EngineError
from miles_olmo.policy.sampling import draw_tokens, uniforms
from miles_olmo.policy.tensor_files import write_tensors
from miles_olmo.policy.weight_files import tensor_checksums
from miles_olmo.wire.generation import SamplingRequest
from tests.policy.policies import ADAPTER, engine, generate, pack_of, policy, requests

PROMPT = (4, 9, 17)


def request(**changes) -> SamplingRequest:
    return replace(SamplingRequest(PROMPT, 6, 1.0, seed=1, stop_token_ids=()), **changes)


def next_logprobs(module, tokens) -> torch.Tensor:
    return ADAPTER.logits(module, torch.tensor([tokens]))[0, -1].log_softmax(dim=-1)


def test_greedy_takes_the_argmax_of_the_full_forward():
    (sampled,) = generate(engine(), [request(temperature=0.0, max_tokens=8)])
    module, tokens = policy(), list(PROMPT)
    for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True):
        row = next_logprobs(module, tokens)
        assert token == int(row.argmax())
        assert logprob == pytest.approx(float(row[token]), abs=1e-5)
        tokens.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_diverged_policy_is_a_named_error_not_an_index_out_of_bounds(temperature):
    subject = engine()
    with torch.no_grad():  # finite weights whose products overflow
        subject._module.lm_head.w_out.weight.fill_(3e38)
    with pytest.raises(EngineError, match="E273"):
        generate(subject, [request(temperature=temperature)])


def test_samples_follow_the_policys_distribution():
    count = 4000
    wanted = [request(seed=seed, max_tokens=1) for seed in range(count)]
    sampled = generate(engine(max_batch_size=2000), wanted)
    observed = Counter(sequence.token_ids[0] for sequence in sampled)
    expected = next_logprobs(policy(), list(PROMPT)).exp().double().numpy() * count
    chi_square = sum((observed[t] - expected[t]) ** 2 / expected[t] for t in range(48))
    # 47 degrees of freedom: the 99.9 % quantile is 82.7. Seeded, so this cannot flake.
    assert chi_square < 82.7


def test_sampling_never_draws_an_impossible_token_nor_runs_off_the_end():
    logprobs = torch.tensor([[-np.inf, np.log(0.5), -np.inf, np.log(0.5), -np.inf]]).float()
    largest = torch.tensor([1.0 - 2.0**-53], dtype=torch.float64)
    greedy = torch.tensor([False])
    for number, token in ((torch.zeros(1, dtype=torch.float64), 1), (largest, 3)):
        assert draw_tokens(logprobs, number, greedy).tolist() == [token]


def test_uniform_streams_are_uniform_fixed_and_different_by_seed():
    numbers = uniforms(5, 10_000)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert (uniforms(5, 3) == numbers[:3]).all()
    assert (uniforms(6, 3) != numbers[:3]).all()
    assert len(set(uniforms(2**62, 2).tolist()) & set(uniforms(2**62 + 2**40, 2).tolist())) == 0


def test_a_stop_token_ends_a_sequence_unless_stops_are_ignored():
    (whole,) = generate(engine(), [request()])
    stop = (whole.token_ids[2],)
    (stopped,) = generate(engine(), [request(stop_token_ids=stop)])
    first = whole.token_ids.index(stop[0])
    assert stopped.token_ids == whole.token_ids[: first + 1]
    assert (whole.finish_reason, stopped.finish_reason) == ("length", "stop")
    (ignored,) = generate(engine(), [request(stop_token_ids=stop, ignore_stop=True)])
    assert ignored.token_ids == whole.token_ids


def test_routes_cover_every_input_position():
    wanted = requests(6)
    for asked, got in zip(wanted, generate(engine(), wanted), strict=True):
        assert got.routes.shape == (len(asked.prompt_ids) + len(got.token_ids) - 1, 2, 2)
        assert got.routes.dtype == np.uint8 and got.routes.max() < 8
    many = engine(num_experts=264, num_layers=1)
    assert generate(many, [request()])[0].routes.dtype == np.uint16


def test_equal_prompts_are_prefilled_once():
    model = engine()
    rows: list[int] = []
    model._module.embeddings.register_forward_hook(lambda _, args, out: rows.append(out.shape[1]))
    generate(model, [request(seed=seed, max_tokens=1) for seed in range(64)])
    assert rows == [32]  # 3 prompt tokens, padded; not 64 times 3


def test_more_sequences_than_slots_wait_their_turn():
    model = engine(max_batch_size=2)
    wanted = [request(seed=seed) for seed in range(5)]
    for index, asked in enumerate(wanted):
        model.add(str(index), asked)
    assert model.num_unfinished == 5
    assert [model.step() for _ in range(5)] == [[]] * 5
    assert [key for key, _ in model.step()] == ["0", "1"]
    assert model.num_unfinished == 3


def test_abort_returns_the_tokens_so_far_and_frees_the_slot():
    model = engine(max_batch_size=1)
    (whole,) = generate(engine(), [request()])
    model.add("running", request())
    model.add("queued", request(seed=2))
    model.step()
    model.step()
    assert model.abort("queued") is None
    partial = model.abort("running")
    assert partial is not None and partial.finish_reason == "abort"
    assert partial.token_ids == whole.token_ids[:2]
    assert partial.logprobs == whole.logprobs[:2]
    assert partial.routes.shape[0] == len(PROMPT) + 1
    assert model.num_unfinished == 0 and model.abort("running") is None
    assert generate(model, [request()])[0].token_ids == whole.token_ids


def test_dropping_the_cache_changes_nothing_under_the_same_weights():
    wanted = requests(6, seed=4, ignore_stop=True, max_tokens=8)
    expected = generate(engine(), wanted)
    model = engine()
    for index, asked in enumerate(wanted):
        model.add(str(index), asked)
    finished = {}
    while model.num_unfinished:
        finished.update(model.step())
        model.drop_cache()
    for index, one in enumerate(expected):
        other = finished[str(index)]
        assert other.token_ids == one.token_ids and other.logprobs == one.logprobs
        assert (other.routes == one.routes).all()


def test_a_refreshed_cache_holds_nothing_of_broken_weights():
    model = engine(max_batch_size=1)
    (expected,) = generate(model, [request()])
    for cached in (*model._cache.keys, *model._cache.values):
        assert cached is not None
        cached.fill_(float("nan"))  # as an overflow in bad weights would leave it
    model.drop_cache()
    assert generate(model, [request()])[0].logprobs == expected.logprobs


def publish(directory, module):
    tensors = dict(ADAPTER.publication_tensors(module))
    path = directory / "weights-00001.safetensors"
    write_tensors(path, tensors)
    return [str(path)], tensor_checksums(tensors.items())


def test_new_weights_in_mid_sequence_continue_under_the_new_weights(tmp_path):
    model = engine(seed=0)
    (old,) = generate(engine(seed=0), [request(max_tokens=8)])
    model.add("a", request(max_tokens=8))
    for _ in range(3):
        model.step()
    model.load_weights(*publish(tmp_path, policy(seed=1)))
    model.drop_cache()
    finished = {}
    while model.num_unfinished:
        finished.update(model.step())
    got = finished["a"]
    assert got.token_ids[:3] == old.token_ids[:3] and got.logprobs[:3] == old.logprobs[:3]
    pack = pack_of([request()], [got])
    logprobs_T = ADAPTER.forward(policy(seed=1), pack, temperature=1.0).logprobs_T
    same_T = logprobs_T == pack.behaviour_logprobs_T
    assert same_T[len(PROMPT) + 3 :].all() and not same_T[len(PROMPT) : len(PROMPT) + 3].any()


def test_loaded_weights_are_the_published_ones(tmp_path):
    model = engine(seed=0)
    paths, checksums = publish(tmp_path, policy(seed=1))
    assert model.checksums() != checksums
    model.load_weights(paths, checksums)
    assert model.checksums() == checksums


@pytest.mark.parametrize(
    ("fault", "code"),
    [("file", "E271"), ("bytes", "E272"), ("missing", "E411"), ("shape", "E412"), ("nan", "E413")],
)
def test_faulty_weights_change_nothing(tmp_path, fault, code):
    model = engine(seed=0)
    before = model.checksums()
    tensors = {n: t.clone() for n, t in ADAPTER.publication_tensors(policy(seed=1))}
    last = sorted(tensors)[-1]
    if fault == "missing":
        del tensors[last]
    elif fault == "shape":
        tensors[last] = tensors[last][:-1]
    elif fault == "nan":
        tensors[last].view(-1)[0] = float("nan")
    path = tmp_path / "weights-00001.safetensors"
    write_tensors(path, tensors)
    checksums = tensor_checksums(tensors.items())
    if fault == "bytes":
        checksums[last] = "0" * 64
    elif fault == "file":
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(EngineError) as caught:
        model.load_weights([str(path)], checksums)
    assert caught.value.code == code
    assert model.checksums() == before


@pytest.mark.parametrize(
    "changes", [{"prompt_ids": ()}, {"prompt_ids": (48,)}, {"max_tokens": 254}, {"max_tokens": 0}]
)
def test_requests_that_do_not_fit_are_refused(changes):
    model = engine()
    with pytest.raises(EngineError) as caught:
        model.add("a", request(**changes))
    assert caught.value.code == "E270" and model.num_unfinished == 0
