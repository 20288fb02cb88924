"""Trainer tokens per second with router replay on against off, forward and backward.

    python benchmarks/trainer_replay.py [--sequences 128] [--repeats 10]

Uses the quickstart's policy on one CPU thread. Both settings run alternately in one process on the
same packs, so the ratio does not depend on what else the machine does; routes are the native ones,
so both compute the same. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from machine import describe_machine

from miles_olmo.algo.pack import Pack
from miles_olmo.manifest.reading import read_manifest
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.generation import CoreEngineModel
from miles_olmo.wire.generation import SamplingRequest

QUICKSTART = Path(__file__).parents[1] / "manifests" / "quickstart.toml"
PROMPT_TOKENS, RESPONSE_TOKENS = 10, 6


def sampled_pack(module, adapter, vocab_size: int, num_sequences: int) -> Pack:
    """Sequences sampled from the policy itself, with their native routes."""
    engine = CoreEngineModel(module, adapter, max_batch_size=num_sequences)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocab_size, (num_sequences, PROMPT_TOKENS), generator=generator)
    for index, prompt in enumerate(prompts.tolist()):
        request = SamplingRequest(tuple(prompt), RESPONSE_TOKENS, 1.0, index, (), ignore_stop=True)
        engine.add(str(index), request)
    answers = {}
    while engine.num_unfinished:
        answers.update(engine.step())
    ids, routes, logprobs, mask = [], [], [], []
    for index, prompt in enumerate(prompts.tolist()):
        answer = answers[str(index)]
        ids += [*prompt, *answer.token_ids]
        rows = torch.from_numpy(answer.routes.astype("int64"))
        routes.append(torch.cat([rows, torch.full_like(rows[:1], -1)]))
        logprobs += [0.0] * PROMPT_TOKENS + list(answer.logprobs)
        mask += [False] * PROMPT_TOKENS + [True] * RESPONSE_TOKENS
    length = PROMPT_TOKENS + RESPONSE_TOKENS
    return Pack(
        ids_T=torch.tensor(ids),
        document_lengths=(length,) * num_sequences,
        sequence_indices=tuple(range(num_sequences)),
        mask_T=torch.tensor(mask),
        advantages_T=torch.zeros(len(ids)),
        behaviour_logprobs_T=torch.tensor(logprobs),
        routes_TLK=torch.cat(routes),
    )


def seconds(module, adapter, pack: Pack) -> float:
    """One forward and backward."""
    started = time.perf_counter()
    adapter.forward(module, pack, temperature=1.0).logprobs_T.sum().backward()
    elapsed = time.perf_counter() - started
    module.zero_grad()
    return elapsed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    manifest, _ = read_manifest(QUICKSTART)
    adapter = adapter_for(manifest.model.family)
    module = adapter.build(manifest.model, manifest.train, device=torch.device("cpu"), seed=0)
    on = sampled_pack(module, adapter, manifest.model.shape.vocab_size, arguments.sequences)
    off = replace(on, routes_TLK=None)
    module.train()
    for pack in (on, off):
        seconds(module, adapter, pack)
    times = {"on": [], "off": []}
    for _ in range(arguments.repeats):
        times["on"].append(seconds(module, adapter, on))
        times["off"].append(seconds(module, adapter, off))
    rates = {name: on.num_tokens / statistics.median(values) for name, values in times.items()}
    report = {
        "benchmark": "trainer_replay",
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "tokens_per_pack": on.num_tokens,
        "tokens_per_second": {name: round(rate) for name, rate in rates.items()},
        "ratio_on_to_off": round(rates["on"] / rates["off"], 3),
    }
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
