"""The random generators a checkpoint saves: torch (CPU and every CUDA device), Python, NumPy.

Data order and sampling draw from derived seeds and need none of this; what is saved covers
whatever a library draws from the global generators.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def capture() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State of the global generators: tensors (uint8) and JSON values."""
    tensors = {"torch_cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            tensors[f"torch_cuda_{index}"] = torch.cuda.get_rng_state(index)
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return tensors, {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def restore(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
    """Put the generators back; devices that are not here any more are left out."""
    torch.set_rng_state(tensors["torch_cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"torch_cuda_{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"torch_cuda_{index}"], index)
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def of_all_ranks(tensors: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of several ranks: the leader's names as they are, the others' as `rank_1.<name>`."""
    return {
        f"rank_{rank}.{name}" if rank else name: tensor
        for rank, named in enumerate(tensors)
        for name, tensor in named.items()
    }


def of_rank(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """One rank's tensors out of those of `of_all_ranks`."""
    prefix = f"rank_{rank}."
    if rank == 0:
        return {name: t for name, t in tensors.items() if not name.startswith("rank_")}
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
