"""Small policies, packs and engine runs that the policy tests share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from miles_olmo.algo.pack import Pack
from miles_olmo.algo.pack_rows import pack_rows
from miles_olmo.manifest.models import Model, Train
from miles_olmo.policy.adapter import Olmo3MoeAdapter, adapter_for
from miles_olmo.policy.generation import CoreEngineModel
from miles_olmo.policy.olmo3moe_model import PortableModel
from miles_olmo.wire.generation import SampledSequence, SamplingRequest

torch.set_num_threads(1)

ADAPTER = Olmo3MoeAdapter()
CPU = torch.device("cpu")

SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 64,
    "num_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "expert_hidden_size": 64,
    "shared_expert_hidden_size": 64,
    "max_position_embeddings": 256,
    "initializer_std": 0.08,
}
SHAPES: dict[str, dict[str, Any]] = {
    "quickstart": {"hidden_size": 128, "expert_hidden_size": 128, "shared_expert_hidden_size": 128},
    "no shared expert": {"shared_expert_hidden_size": 0},
    "sigmoid, normalised": {"router": "sigmoid", "normalize_expert_weights": True},
    "grouped queries": {"num_key_value_heads": 2, "head_dim": 64},
    "one expert of many": {"num_experts": 32, "num_experts_per_token": 1, "num_layers": 3},
    "wide": {"hidden_size": 512, "expert_hidden_size": 256, "num_experts_per_token": 4},
    "windows shorter than documents": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 5,
    },
    "windows longer than documents": {
        "layer_types": ["sliding_attention"],
        "sliding_window": 100,
    },
    "gate per head": {"attention_gate_type": "headwise", "num_key_value_heads": 2},
    "gate per element": {
        "attention_gate_type": "elementwise",
        "attention_gate_full_precision": False,
    },
    "dense first layer": {"dense_layers_indices": [0], "dense_hidden_size": 96},
    "norms everywhere": {"use_peri_ln": True, "embed_norm": True, "embed_scale": 3.0},
    "no positions, norm over all heads": {"use_rope": False, "use_head_qk_norm": False},
    "scaled expert weights": {
        "normalize_expert_weights": True,
        "expert_weights_norm": 2.0,
        "restore_weight_scale": True,
        "original_num_experts_per_token": 4,
    },
    "all together": {
        "num_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 17,
        "attention_gate_type": "headwise",
        "dense_layers_indices": [0, 2],
        "dense_hidden_size": 64,
        "use_peri_ln": True,
        "embed_norm": True,
        "router": "sigmoid",
    },
    "olmoe": {
        "family": "olmoe",
        "hidden_size": 128,
        "use_head_qk_norm": False,
        "shared_expert_hidden_size": 0,
    },
}


def model_of(family: str = "olmo3moe", **changes: Any) -> Model:
    return Model.model_validate({"family": family, "shape": {**SHAPE, **changes}})


def train_of(recompute: str = "none") -> Train:
    settings = {
        "steps": 1,
        "optimizer": {"learning_rate": 1e-3},
        "packing": {"max_tokens": 4096},
        "recompute": recompute,
    }
    return Train.model_validate(settings)


def policy(seed: int = 0, recompute: str = "none", **changes: Any) -> PortableModel:
    return ADAPTER.build(model_of(**changes), train_of(recompute), device=CPU, seed=seed)


def engine(seed: int = 0, max_batch_size: int = 64, **changes: Any) -> CoreEngineModel:
    model = model_of(**changes)
    adapter = adapter_for(model.family)
    module = adapter.build(model, None, device=CPU, seed=seed)
    return CoreEngineModel(module, adapter, max_batch_size=max_batch_size)


def requests(
    count: int, seed: int = 0, vocab_size: int = 48, longest: int = 40, **changes: Any
) -> list[SamplingRequest]:
    """Requests of mixed lengths; every second prompt occurs twice."""
    random = np.random.default_rng(seed)
    made: list[SamplingRequest] = []
    for index in range(count):
        length = int(random.integers(1, longest))
        prompt = tuple(int(token) for token in random.integers(0, vocab_size, length))
        if index % 2:
            prompt = made[-1].prompt_ids
        budget = int(random.integers(1, 12))
        request = SamplingRequest(
            prompt, budget, 1.0, seed=seed * 1000 + index, stop_token_ids=(2,)
        )
        made.append(replace(request, **changes))
    return made


def generate(model: CoreEngineModel, wanted: list[SamplingRequest]) -> list[SampledSequence]:
    """Run all requests to their end, in one engine."""
    for index, request in enumerate(wanted):
        model.add(str(index), request)
    finished: dict[str, SampledSequence] = {}
    while model.num_unfinished:
        finished.update(model.step())
    return [finished[str(index)] for index in range(len(wanted))]


def pack_of(
    wanted: list[SamplingRequest],
    sampled: list[SampledSequence],
    *,
    replay: bool = True,
    indices: list[int] | None = None,
    share_prefixes: bool | None = None,
) -> Pack:
    """A pack of finished sequences, in the order of `indices`; None: every token is computed."""
    indices = list(range(len(wanted))) if indices is None else indices
    ids, mask, logprobs, routes, lengths = [], [], [], [], []
    for index in indices:
        prompt, response = wanted[index].prompt_ids, sampled[index].token_ids
        ids += [*prompt, *response]
        mask += [False] * len(prompt) + [True] * len(response)
        logprobs += [0.0] * len(prompt) + list(sampled[index].logprobs)
        lengths.append(len(prompt) + len(response))
        rows = torch.from_numpy(sampled[index].routes.astype(np.int64))
        routes.append(torch.cat([rows, torch.full((1, *rows.shape[1:]), -1)]))
    advantages = [
        float(index % 5 - 2)
        for index, length in zip(indices, lengths, strict=True)
        for _ in range(length)
    ]
    ids_T, routes_TLK = torch.tensor(ids), torch.cat(routes) if replay else None
    row_T, token_R = None, None
    if share_prefixes is not None:
        row_T, token_R = pack_rows(ids_T, routes_TLK, lengths, share_prefixes=share_prefixes)
    return Pack(
        ids_T=ids_T,
        document_lengths=tuple(lengths),
        sequence_indices=tuple(indices),
        mask_T=torch.tensor(mask),
        advantages_T=torch.tensor(advantages),
        behaviour_logprobs_T=torch.tensor(logprobs),
        routes_TLK=routes_TLK,
        row_T=row_T,
        token_R=token_R,
    )


def without_routes(pack: Pack) -> Pack:
    return replace(pack, routes_TLK=None)
