"""How full packs are, against the optimum, on lognormal and adversarial lengths.

    python benchmarks/packing_fill.py [--json]

Fill is tokens / (packs x max_tokens). `packs_over_bound` compares with a proven lower bound, and on
small instances `packs_over_optimum` with the exact optimum found by branch and bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_olmo.algo.packing import lower_bound, pack_lengths

SEED = 0


@dataclass(frozen=True)
class Result:
    """One family of instances, summed."""

    name: str
    instances: int
    sequences: int
    packs: int
    bound: int
    """Lower bound of the packs."""
    optimum: int | None
    """Exact fewest packs, where it was computed."""
    fill: float
    best_fill: float
    """Fill of the lower bound (of the optimum, where known): no packing can be fuller."""
    packs_over_bound: float
    packs_over_optimum: float | None
    seconds: float


def exact_packs(lengths: Sequence[int], max_tokens: int) -> int:
    """Fewest packs, by branch and bound: longest first, each into every distinct room."""
    ordered = sorted(lengths, reverse=True)
    best = len(pack_lengths(lengths, max_tokens))
    bound = lower_bound(lengths, max_tokens)
    suffix = [sum(ordered[position:]) for position in range(len(ordered) + 1)]

    def place(position: int, rooms: list[int]) -> None:
        nonlocal best
        overflow = suffix[position] - sum(rooms)
        if best == bound or len(rooms) + max(0, -(-overflow // max_tokens)) >= best:
            return
        if position == len(ordered):
            best = len(rooms)
            return
        length = ordered[position]
        for room in sorted({room for room in rooms if room >= length}):
            rest = list(rooms)
            rest.remove(room)
            place(position + 1, [*rest, room - length])
            if room == length:  # an exactly full pack is never worse
                return
        place(position + 1, [*rooms, max_tokens - length])

    place(0, [])
    return best


def instances() -> Iterator[tuple[str, bool, list[tuple[list[int], int]]]]:
    """(name, whether to solve exactly, [(lengths, max_tokens)])."""
    rng = random.Random(SEED)

    def lognormal(count: int, max_tokens: int) -> list[int]:
        draws = (int(rng.lognormvariate(6.5, 0.9)) for _ in range(count))
        return [min(max_tokens, max(1, draw)) for draw in draws]

    for max_tokens in (4096, 8192, 16384):
        batch = [(lognormal(512, max_tokens), max_tokens) for _ in range(5)]
        yield f"lognormal, 512 sequences, packs of {max_tokens}", False, batch
    small = [(lognormal(rng.randint(8, 16), 2048), 2048) for _ in range(100)]
    yield "lognormal, 8-16 sequences, packs of 2048", True, small
    # Lengths just above 1/2, 1/3, 1/4 of a pack: the worst case of decreasing fits.
    n, c = 10, 1000
    worst = [501] * n * 2 + [252] * n * 2 + [251] * n * 2 + [248] * n * 4
    yield "adversarial: 1/2, 1/4 +- e (11/9 family)", False, [(worst, c)]
    thirds = [([n for _ in range(20) for n in _triple(rng, 1000)], 1000) for _ in range(20)]
    yield "adversarial: triples that fill a pack exactly", False, thirds
    tight = [([n for _ in range(4) for n in _triple(rng, 300)], 300) for _ in range(100)]
    yield "adversarial: 4 exact triples", True, tight
    large = [([rng.randint(c // 2 + 1, c) for _ in range(256)], c) for _ in range(5)]
    yield "adversarial: all above half a pack", False, large


def _triple(rng: random.Random, total: int) -> list[int]:
    first, second = rng.randint(total // 4, total // 2), rng.randint(total // 4, total // 3)
    return [first, second, total - first - second]


def measure(name: str, exact: bool, batch: list[tuple[list[int], int]]) -> Result:
    start = time.perf_counter()
    packs = sum(len(pack_lengths(lengths, max_tokens)) for lengths, max_tokens in batch)
    seconds = time.perf_counter() - start
    bound = sum(lower_bound(lengths, max_tokens) for lengths, max_tokens in batch)
    optimum = sum(exact_packs(*instance) for instance in batch) if exact else None
    tokens = sum(sum(lengths) for lengths, _ in batch)
    max_tokens = batch[0][1]
    return Result(
        name=name,
        instances=len(batch),
        sequences=sum(len(lengths) for lengths, _ in batch),
        packs=packs,
        bound=bound,
        optimum=optimum,
        fill=tokens / (packs * max_tokens),
        best_fill=tokens / ((optimum or bound) * max_tokens),
        packs_over_bound=packs / bound,
        packs_over_optimum=packs / optimum if optimum else None,
        seconds=seconds,
    )


def machine() -> str:
    """CPU model, count and system."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    return f"{os.cpu_count()} x {name}, {platform.platform()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON document only")
    arguments = parser.parse_args()
    results = [measure(*instance) for instance in instances()]
    report = {
        "benchmark": "packing_fill",
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "python": platform.python_version(),
        "seed": SEED,
        "results": [asdict(result) for result in results],
    }
    if not arguments.json:
        print(f"{report['command']}\n{report['machine']}, Python {report['python']}\n")
        print(f"{'lengths':<48} {'fill':>7} {'best':>7} {'/bound':>7} {'/exact':>7} {'s':>7}")
        for r in results:
            ratio = f"{r.packs_over_optimum:.4f}" if r.packs_over_optimum else "-"
            print(
                f"{r.name:<48} {r.fill:7.4f} {r.best_fill:7.4f} {r.packs_over_bound:7.4f} "
                f"{ratio:>7} {r.seconds:7.3f}"
            )
        print()
    print(json.dumps(report, indent=2 if arguments.json else None))


if __name__ == "__main__":
    main()
