"""The weights that a run starts from: a Hugging Face directory, a converted checkpoint, or a run's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from miles_olmo.base.errors import CheckpointError, EngineError
from miles_olmo.manifest.hugging_face import CONFIG
from miles_olmo.policy.checkpoint import load_weights
from miles_olmo.policy.family import FamilyAdapter
from miles_olmo.policy.hugging_face_weights import read_hugging_face_weights
from miles_olmo.policy.weights_checkpoint import (
    is_weights_checkpoint,
    open_weights_checkpoint,
    read_weights,
)


def load_initial_weights(path: Path, module: nn.Module, adapter: FamilyAdapter) -> None:
    """Replace every tensor of the policy, all or nothing.

    Weights of a Hugging Face directory are cast to the module's dtype: exactly from a narrower one, with
    one rounding from a wider one.

    Raises:
        CheckpointError: E440 a file cannot be read, E441 the weights are not this policy's (both of a
            Hugging Face directory); E400, E401, E404, E405 of a checkpoint.
    """
    if (path / CONFIG).is_file():
        load_named(path, cast_like(read_hugging_face_weights(path), module), module, adapter)
    elif is_weights_checkpoint(path):
        open_weights_checkpoint(path)  # every byte is checked before any is used
        load_named(path, read_weights(path), module, adapter)
    else:
        load_weights(path, module, adapter)


def load_named(
    source: Path, tensors: Mapping[str, torch.Tensor], module: nn.Module, adapter: FamilyAdapter
) -> None:
    """Load tensors that were read from `source`.

    Raises:
        CheckpointError: E441, they are not this policy's; it is unchanged then.
    """
    try:
        adapter.load_tensors(module, tensors)
    except EngineError as error:
        raise CheckpointError(
            "E441",
            f"the weights of {source} do not fit the policy: {error.what}",
            why="the model that is described beside them is another one",
            fix="use the config.json that the weights were saved with",
            **error.details,
        ) from error


def cast_like(tensors: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors in the dtype of the module's parameters."""
    dtype = next(module.parameters()).dtype
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}
