"""Publishing a policy version as files that engines read.

Every tensor once, under its Hugging Face name, with its sha256; `publication.json` is written last and
the directory appears atomically, so an engine can only see a complete version. NaN and
infinity are refused before anything becomes visible. Nothing is synced to the disk: a publication has to
outlive neither its run's processes nor a power failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from miles_olmo.base.errors import CheckpointError
from miles_olmo.policy.atomic_directory import atomic_directory, remove_directory, remove_leftovers
from miles_olmo.policy.family import FamilyAdapter
from miles_olmo.policy.tensor_files import dtype_name, file_groups, is_finite, write_tensors
from miles_olmo.wire.publication import MANIFEST_NAME, Publication, PublishedTensor

MAX_FILE_BYTES = 512 * 1024 * 1024
"""Tensors are grouped into files of at most this size; a larger tensor has a file of its own."""

_TARGETS = r"v\d{6,}"


def write_publication(
    module: nn.Module, adapter: FamilyAdapter, directory: Path, version: int
) -> Publication:
    """Write version `version` of the policy to `directory`, e.g. `publish/v000012`.

    A publication that is already there is replaced. In memory are at most one file's tensors beside
    the policy and one tensor that is gathered from several ranks.

    Raises:
        CheckpointError: E410 a tensor without a name; E420 NaN or infinity (details: `tensors`);
            E421 the files could not be written. There is no new publication then.
    """
    published: list[PublishedTensor] = []
    bad: list[str] = []
    tensors = adapter.publication_tensors(module)
    try:
        with atomic_directory(directory, durable=False) as writing:
            for number, group in enumerate(file_groups(tensors, MAX_FILE_BYTES), start=1):
                bad += _not_finite(group)
                if bad:
                    continue  # to the end: the message names all of them
                path = writing / f"weights-{number:05d}.safetensors"
                file = write_tensors(path, group, hash_file=False)  # engines check every tensor
                published += [
                    PublishedTensor(
                        name,
                        dtype_name(tensor.dtype),
                        tuple(tensor.shape),
                        file.tensors[name],
                        file.name,
                    )
                    for name, tensor in group.items()
                ]
            _refuse_non_finite(bad, version)
            publication = Publication(version, str(directory.resolve()), tuple(published))
            # No indentation: json would fall back to its encoder in Python, ten times slower.
            text = json.dumps(publication.as_json(), sort_keys=True) + "\n"
            (writing / MANIFEST_NAME).write_text(text)
    except OSError as error:
        raise CheckpointError(
            "E421",
            f"version {version} could not be written to {directory}: {error.strerror or error}",
            why="engines read the weights from these files; they keep the previous version",
            fix="free disk space or lower publish.keep, then resume",
            path=str(directory),
            errno=error.errno,
        ) from error
    return publication


def prune_publications(directory: Path, keep: int) -> list[int]:
    """Remove all but the newest `keep` versions in `directory`, and leftovers of killed writes.

    Returns:
        The versions that were removed, ascending.
    """
    assert keep >= 1
    remove_leftovers(directory, _TARGETS)
    entries = directory.iterdir() if directory.is_dir() else ()
    versions = {
        int(entry.name[1:]): entry for entry in entries if re.fullmatch(_TARGETS, entry.name)
    }
    old = sorted(versions)[:-keep]
    for version in old:
        remove_directory(versions[version], durable=False)
    return old


def assist_publication(module: nn.Module, adapter: FamilyAdapter) -> None:
    """What the other ranks do while the leader runs `write_publication`."""
    for _ in adapter.publication_tensors(module):
        pass


def _not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not is_finite(tensor)]


def _refuse_non_finite(bad: Sequence[str], version: int) -> None:
    if bad:
        raise CheckpointError(
            "E420",
            f"version {version} holds NaN or infinity in {len(bad)} tensors, first '{bad[0]}'",
            why="engines would sample garbage from it",
            fix="lower train.optimizer.learning_rate and resume from the last checkpoint",
            tensors=list(bad),
        )
