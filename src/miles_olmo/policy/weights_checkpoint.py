"""A converted checkpoint: weights in Core's dtype, the model they belong to, no trainer state.

    olmoe-core/
      weights.safetensors   every tensor under its Hugging Face name
      model.json            the [model] table and the special token ids
      conversion.json       the receipt: where it came from, the logits check
      tokenizer/            the tokenizer files of the source, byte for byte
      complete.json         size and sha256 of the files above; written last

It is what `model.checkpoint` may name, like a run's own checkpoint; a plan fills [model] from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from miles_olmo.base.canonical import file_sha256
from miles_olmo.base.errors import CheckpointError
from miles_olmo.manifest.models import Model
from miles_olmo.policy.export_tokenizer import CopiedTokenizer, SpecialTokenIds, copy_tokenizer
from miles_olmo.policy.tensor_files import read_tensors, write_tensors

SCHEMA = "miles-olmo/weights/v1"
MODEL_SCHEMA = "miles-olmo/model/v1"
WEIGHTS = "weights.safetensors"
MODEL = "model.json"
RECEIPT = "conversion.json"
TOKENIZER = "tokenizer"
COMPLETE = "complete.json"


@dataclass(frozen=True)
class WeightsCheckpoint:
    """A converted checkpoint whose files are complete."""

    path: Path
    model: Model
    tokenizer: CopiedTokenizer


def write_weights_checkpoint(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    model: Model,
    tokenizer: CopiedTokenizer,
) -> None:
    """Write all but the receipt and complete.json into an empty directory.

    Raises:
        OSError: a file could not be read or written.
    """
    write_tensors(directory / WEIGHTS, tensors)
    (directory / TOKENIZER).mkdir()
    copy_tokenizer(tokenizer.folder, directory / TOKENIZER)
    content = {
        "schema": MODEL_SCHEMA,
        "model": model.model_dump(mode="json", exclude={"checkpoint"}),
        "special_token_ids": asdict(tokenizer.ids),
    }
    _write_json(directory / MODEL, content)


def complete_weights_checkpoint(directory: Path, receipt: Mapping[str, Any]) -> None:
    """Write the receipt, then complete.json over all files; the caller makes the directory appear.

    Raises:
        OSError: a file could not be written.
    """
    _write_json(directory / RECEIPT, receipt)
    files = {
        path.relative_to(directory).as_posix(): {
            "size": path.stat().st_size,
            "sha256": file_sha256(path),
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    _write_json(directory / COMPLETE, {"schema": SCHEMA, "files": files})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def is_weights_checkpoint(path: Path) -> bool:
    """Whether a directory says that it is one."""
    try:
        return json.loads((path / COMPLETE).read_text())["schema"] == SCHEMA
    except (OSError, ValueError, KeyError, TypeError):
        return False


def open_weights_checkpoint(path: Path) -> WeightsCheckpoint:
    """Check every file against complete.json and read the model.

    Raises:
        CheckpointError: E401, it is damaged.
    """
    try:
        files = json.loads((path / COMPLETE).read_text())["files"]
        for name in (WEIGHTS, MODEL, *files):
            file, expected = path / name, files[name]
            if file.stat().st_size != expected["size"] or file_sha256(file) != expected["sha256"]:
                raise _damaged(file, "its bytes are not the recorded ones")
        content = json.loads((path / MODEL).read_text())
        model = Model.model_validate_json(json.dumps(content["model"]))
        ids = SpecialTokenIds(**content["special_token_ids"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise _damaged(path, f"{error}") from error
    return WeightsCheckpoint(path, model, CopiedTokenizer(path / TOKENIZER, ids))


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint in `path`, on the CPU.

    Raises:
        CheckpointError: E401, the file cannot be read.
    """
    try:
        return read_tensors(path / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise _damaged(path / WEIGHTS, f"{error}") from error


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "E401",
        f"converted checkpoint {path} is damaged: {reason}",
        why="the run would start from other weights than those that were converted",
        fix="convert the checkpoint again",
        path=str(path),
    )
