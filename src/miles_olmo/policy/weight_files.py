"""Reading published weights, every byte checked before any of it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError

from miles_olmo.base.errors import EngineError
from miles_olmo.policy.tensor_files import read_tensors, tensor_sha256


def read_checked(paths: Sequence[Path], checksums: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """All tensors of the files, on the CPU.

    Args:
        paths: safetensors files; each tensor is in one of them.
        checksums: sha256 of each tensor's contiguous little-endian bytes, by name.

    Raises:
        EngineError: E271 a file is missing or not safetensors, or two hold the same tensor;
            E272 a tensor's bytes do not match, or names and checksums differ.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        content = _read(path)
        twice = sorted(content.keys() & tensors.keys())
        if twice:
            raise EngineError(
                "E271",
                f"{path} holds '{twice[0]}' again",
                why="each tensor of a publication is in one file",
                fix="publish the version again",
            )
        tensors.update(content)
    _check_checksums(tensors, checksums)
    return tensors


def tensor_checksums(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """sha256 of each tensor's contiguous little-endian bytes, by name."""
    return {name: tensor_sha256(tensor) for name, tensor in tensors}


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return read_tensors(path)
    except (OSError, SafetensorError) as error:
        raise EngineError(
            "E271",
            f"{path} cannot be read: {error}",
            why="the engine keeps its old weights unless every tensor of the new version is there",
            fix="publish the version again",
            path=str(path),
        ) from error


def _check_checksums(tensors: Mapping[str, torch.Tensor], checksums: Mapping[str, str]) -> None:
    unknown = sorted(tensors.keys() ^ checksums.keys())
    wrong = [
        name
        for name in sorted(tensors.keys() & checksums.keys())
        if tensor_sha256(tensors[name]) != checksums[name]
    ]
    if unknown or wrong:
        raise EngineError(
            "E272",
            f"{len(wrong)} tensors do not match their sha256 and {len(unknown)} are missing on one "
            f"side, first '{(wrong + unknown)[0]}'",
            why="the weights on disk are not the ones that were published",
            fix="publish the version again",
            tensors=wrong + unknown,
        )
