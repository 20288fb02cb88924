"""The tensors of a Hugging Face checkpoint: one safetensors file, or shards and their index."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError

from miles_olmo.base.errors import CheckpointError
from miles_olmo.policy.tensor_files import read_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def read_hugging_face_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor, in the dtype of the files, on the CPU.

    Raises:
        CheckpointError: E440, a file is missing or damaged, the index and the files disagree, or a
            tensor is quantized.
    """
    if not (directory / INDEX).is_file():
        return _read(directory / SINGLE)
    try:
        index: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
        names = sorted(set(index.values()), key=str)  # of any type yet
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(directory / INDEX, f"{error}") from error
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise _unreadable(directory / INDEX, f"it names {name!r}, which is no file beside it")
        shard = _read(directory / name)
        listed = {tensor for tensor, file in index.items() if file == name}
        if listed != shard.keys():
            first = min(listed ^ shard.keys())
            raise _unreadable(directory / name, f"file and index disagree about '{first}'")
        tensors |= shard
    return tensors


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = read_tensors(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, f"{error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                "E440",
                f"{path} cannot be read: '{name}' is {kind}",
                why="integers and 8-bit floats are weights only together with scales, which are not applied",
                fix="name a checkpoint in float32, bfloat16 or float16",
                path=str(path),
            )
    return tensors


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "E440",
        f"{path} cannot be read: {reason}",
        why="every tensor of the policy is needed",
        fix="download or copy the checkpoint again",
        path=str(path),
    )
