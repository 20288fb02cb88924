"""Trainer tokens per second on one GPU, forward and backward, against a plain OLMo-core model.

    python benchmarks/gpu_training.py [--layers 16] [--documents 8] [--tokens 8192] [--repeats 6]

The shape is OLMoE-1B-7B's (2048 wide, 64 experts, 8 a token), weights are random, documents have
different lengths. Both models see the same ids and routes in one process, one after the other, with
and without replay and recompute; a figure is the median of the repeats. FLOPs are those of the
products (6 for each weight used and token, and causal attention); no recomputed work is counted.
Both models have the same weights; that they compute the same is
checked before anything is timed. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import plain_core_moe
import torch
from machine import describe_machine

from miles_olmo.algo.pack import Pack
from miles_olmo.manifest.models import Model
from miles_olmo.policy.adapter import Olmo3MoeAdapter
from miles_olmo.policy.numerics import rules_for
from miles_olmo.policy.olmo3moe_build import model_config

VOCABULARY = 50_304


def shape_of(layers: int) -> Model:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 2048,
        "num_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_token": 8,
        "expert_hidden_size": 1024,
        "shared_expert_hidden_size": 0,
        "router": "softmax",
        "max_position_embeddings": 8192,
    }
    return Model.model_validate({"family": "olmo3moe", "dtype": "bfloat16", "shape": shape})


def document_lengths(tokens: int, documents: int) -> tuple[int, ...]:
    """Different lengths that add up, longest about twice the shortest."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(documents, generator=generator) + 1.0
    lengths = (weights / weights.sum() * tokens).int()
    lengths[0] += tokens - lengths.sum()
    return tuple(lengths.tolist())


def pack_of(lengths: tuple[int, ...], layers: int) -> Pack:
    """Random ids and routes; every token after a document's first is trained."""
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = False
    routes = torch.stack(
        [torch.rand(tokens, 64, generator=generator).topk(8).indices for _ in range(layers)], dim=1
    )
    return Pack(
        ids_T=torch.randint(0, VOCABULARY, (tokens,), generator=generator),
        document_lengths=lengths,
        sequence_indices=tuple(range(len(lengths))),
        mask_T=mask,
        advantages_T=torch.zeros(tokens),
        behaviour_logprobs_T=torch.zeros(tokens),
        routes_TLK=routes,
    )


def flops(layers: int, lengths: tuple[int, ...]) -> float:
    """Of the products of one forward and backward."""
    used = layers * (4 * 2048**2 + 3 * 2048 * 1024 * 8 + 2048 * 64) + VOCABULARY * 2048
    attention = layers * 6 * 2048 * sum(length**2 for length in lengths)
    return 6.0 * used * sum(lengths) + attention


@dataclass(frozen=True)
class Measured:
    """One model on one pack."""

    loss: float
    seconds: float
    """Median of one forward and backward."""
    peak_gib: float
    """Most memory that was allocated."""


def measure(loss: Callable[[], torch.Tensor], model: torch.nn.Module, repeats: int) -> Measured:
    times, value = [], 0.0
    torch.cuda.reset_peak_memory_stats()
    for index in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        total = loss()
        total.backward()
        torch.cuda.synchronize()
        if index >= 2:
            times.append(time.perf_counter() - started)
        value = float(total.detach())
        for parameter in model.parameters():
            parameter.grad = None
    peak = torch.cuda.max_memory_allocated() / 2**30
    return Measured(value, statistics.median(times), peak)


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model.train()


def free(model: torch.nn.Module) -> None:
    model.to("meta")
    gc.collect()
    torch.cuda.empty_cache()


def ours(
    model: Model, recompute: bool, packs: dict[str, Pack], repeats: int
) -> dict[str, Measured]:
    adapter, device = Olmo3MoeAdapter(), torch.device("cuda")
    module = randomize(model_config(model, recompute=recompute).build(init_device="cuda"))
    for block in module.portable_blocks():
        block.rules = rules_for(device, model.dtype)
    found = {}
    for name, pack in packs.items():

        def loss(pack: Pack = pack) -> torch.Tensor:
            return -adapter.forward(module, pack, temperature=1.0).logprobs_T.sum()

        found[name] = measure(loss, module, repeats)
    free(module)
    return found


def plain(
    model: Model, recompute: bool, packs: dict[str, Pack], repeats: int
) -> dict[str, Measured]:
    module = randomize(plain_core_moe.build(model.shape, recompute=recompute))
    found = {}
    for name, pack in packs.items():

        def loss(pack: Pack = pack) -> torch.Tensor:
            plain_core_moe.replay(module, pack.routes_TLK)
            return plain_core_moe.loss(module, pack.ids_T, pack.document_lengths)

        found[name] = measure(loss, module, repeats)
    free(module)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=6)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_training: torch sees no CUDA device; nothing was measured", file=sys.stderr)
        return 1
    lengths = document_lengths(arguments.tokens, arguments.documents)
    model = shape_of(arguments.layers)
    on = pack_of(lengths, arguments.layers).to(torch.device("cuda"))
    packs = {"replay off": replace(on, routes_TLK=None), "replay on": on}
    work, rows = flops(arguments.layers, lengths), []
    for recompute in (False, True):
        yardstick = plain(model, recompute, packs, arguments.repeats)
        measured = ours(model, recompute, packs, arguments.repeats)
        for name in packs:
            difference = abs(measured[name].loss / yardstick[name].loss - 1)
            assert difference < 1e-3, (name, measured[name], yardstick[name])
            rows.append(
                {
                    "recompute": recompute,
                    "replay": name == "replay on",
                    "tokens_per_second": round(arguments.tokens / measured[name].seconds),
                    "tflop_per_second": round(work / measured[name].seconds / 1e12),
                    "peak_gib": round(measured[name].peak_gib, 1),
                    "plain_tokens_per_second": round(arguments.tokens / yardstick[name].seconds),
                    "plain_peak_gib": round(yardstick[name].peak_gib, 1),
                    "ratio_to_plain": round(yardstick[name].seconds / measured[name].seconds, 3),
                }
            )
    report = {
        "benchmark": "gpu_training",
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine() | {"gpu": torch.cuda.get_device_name()},
        "document_lengths": lengths,
        "layers": arguments.layers,
        "results": rows,
    }
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
