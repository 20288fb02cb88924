"""Checkpoints: all of a trainer's state, visible only when complete, without pickle.

    checkpoints/step-000080/
      weights.safetensors     the policy under its Hugging Face names
      optimizer.safetensors   moments (and float32 masters) under the module's names
      random.safetensors      generator states of each rank
      state.json              everything else: step, version, cursor, topology, plan digest, ...
      complete.json           size and sha256 of the files above; written last

A save writes a hidden directory, syncs it and renames it (`atomic_directory`), so a kill at any point
leaves the previous checkpoint in force. The cursor is opaque here; its owner is the sample source.

Several ranks: the leader writes all, in the format of one process. Experts are gathered tensor by
tensor, so beside the policy it holds one whole tensor (all experts of one projection of one layer)
at a time. The topology is recorded and must be the same on a resume, where every rank reads its part.
Left out: files written by several ranks at once, and saving in the background.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from miles_olmo.base.canonical import file_sha256
from miles_olmo.base.errors import CheckpointError, EngineError
from miles_olmo.policy import random_state
from miles_olmo.policy.atomic_directory import atomic_directory, remove_directory, remove_leftovers
from miles_olmo.policy.family import FamilyAdapter
from miles_olmo.policy.optimizer import PolicyOptimizer
from miles_olmo.policy.rank_messages import Message
from miles_olmo.policy.ranks import ALONE, Ranks
from miles_olmo.policy.tensor_files import (
    WrittenFile,
    read_tensors,
    write_tensor_stream,
    write_tensors,
)

SCHEMA = "miles-olmo/checkpoint/v1"
WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
RANDOM = "random.safetensors"
STATE = "state.json"
COMPLETE = "complete.json"
_FILES = (WEIGHTS, OPTIMIZER, RANDOM, STATE)
_TARGETS = r"step-\d{6,}"


@dataclass(frozen=True)
class TrainerState:
    """What a trainer is besides weights, moments and generators. JSON-safe throughout."""

    step: int
    """Training steps finished."""
    version: int
    """Policy version of the weights."""
    num_updates: int
    """Optimizer updates taken; the learning rate is a pure function of it."""
    cursor: Mapping[str, Any]
    """Where the sample source stands; its owner reads it."""
    topology: Mapping[str, int]
    """Trainer processes, e.g. {"data": 1, "expert": 1}."""
    plan_digest: str
    """Digest of the plan that was executed."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """`[train.schedule]` and the number of updates it was laid out for."""
    alarm: Mapping[str, Any] = field(default_factory=dict)
    """What the collapse alarm remembers; its owner reads it."""


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A visible checkpoint directory that cannot be used."""

    path: Path
    reason: str


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint that verifies, and the newer ones that did not."""

    path: Path | None
    skipped: tuple[SkippedCheckpoint, ...]


def save_checkpoint(
    directory: Path,
    state: TrainerState,
    module: nn.Module,
    optimizer: PolicyOptimizer,
    adapter: FamilyAdapter,
    *,
    keep: int,
    ranks: Ranks = ALONE,
) -> Path:
    """Write `<directory>/step-<step>`, then remove all but the newest `keep` complete ones.

    The leader writes everything, whole tensors whatever the number of ranks; the other ranks call
    `assist_save`. Leftovers of killed saves are removed first. A checkpoint of the same step is replaced.

    Raises:
        CheckpointError: E402, it could not be written (a full disk, no permission, ...). The partial
            one is gone; older ones are untouched.
    """
    target = directory / f"step-{state.step:06d}"
    try:
        remove_leftovers(directory, _TARGETS)
        with atomic_directory(target) as writing:
            _write(writing, state, module, optimizer, adapter, ranks)
        for step in _complete_steps(directory)[:-keep]:
            remove_directory(visible_checkpoints(directory)[step])
    except OSError as error:
        raise CheckpointError(
            "E402",
            f"checkpoint {target} could not be written: {error.strerror or error}",
            why="a checkpoint needs room for weights, moments and masters beside the kept ones",
            fix="free disk space or lower checkpoint.keep, then resume from the previous checkpoint",
            path=str(target),
            errno=error.errno,
        ) from error
    return target


def assist_save(
    module: nn.Module, optimizer: PolicyOptimizer, adapter: FamilyAdapter, ranks: Ranks
) -> None:
    """What the other ranks do while the leader runs `save_checkpoint`: the same gathers in order."""
    tensors, values = random_state.capture()
    ranks.send(0, Message(values, tensors))
    for _ in adapter.publication_tensors(module):
        pass
    for _ in optimizer.whole_state_tensors():
        pass


def visible_checkpoints(directory: Path) -> dict[int, Path]:
    """Checkpoint directories by step, complete or not."""
    entries = directory.iterdir() if directory.is_dir() else ()
    matches = ((re.fullmatch(_TARGETS, entry.name), entry) for entry in entries)
    return {int(match[0].removeprefix("step-")): entry for match, entry in matches if match}


def newest_complete(directory: Path) -> NewestCheckpoint:
    """The newest checkpoint whose every byte verifies; newer ones are reported, not used."""
    skipped = []
    for _, path in sorted(visible_checkpoints(directory).items(), reverse=True):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            skipped.append(SkippedCheckpoint(path, f"{error.what} ({error.code})"))
        else:
            return NewestCheckpoint(path, tuple(skipped))
    return NewestCheckpoint(None, tuple(skipped))


def verify_checkpoint(path: Path) -> TrainerState:
    """Check every file against `complete.json` and read the state; loads no tensor.

    Raises:
        CheckpointError: E400 incomplete, E401 damaged, E405 another format, E407 not there (any more).
    """
    try:
        return _verified(path)
    except (CheckpointError, OSError) as error:
        if path.is_dir():
            raise
        raise CheckpointError(
            "E407",
            f"there is no checkpoint {path}",
            why="a run removes all but its newest checkpoint.keep checkpoints",
            fix="name a newer one, or raise checkpoint.keep",
            path=str(path),
        ) from error


def _verified(path: Path) -> TrainerState:
    complete = _read_json(
        path, COMPLETE, "E400", "its last file is not there: the save was cut off"
    )
    if complete.get("schema") != SCHEMA:
        raise CheckpointError(
            "E405",
            f"checkpoint {path} has the format {complete.get('schema')!r}",
            why=f"this version reads {SCHEMA!r}",
            fix="resume with the version of miles-olmo that wrote it",
        )
    for name in _FILES:
        _verify_file(path / name, complete)
    content = _read_json(path, STATE, "E401", "it is not JSON")
    try:
        return TrainerState(**content["state"])
    except (KeyError, TypeError) as error:
        raise _damaged(path / STATE, f"its fields are not those of a trainer: {error}") from error


def load_checkpoint(
    path: Path,
    module: nn.Module,
    optimizer: PolicyOptimizer,
    adapter: FamilyAdapter,
    *,
    topology: Mapping[str, int],
    rank: int = 0,
    fingerprint: str | None = None,
) -> TrainerState:
    """Restore weights, optimizer and generators; training continues bit for bit.

    Everything is verified before anything is changed. Every rank loads its own part.

    Args:
        rank: Whose generators to restore.
        fingerprint: `checkpoint_fingerprint` that the leader has verified; the files are then
            not verified again, only that they are the same.

    Raises:
        CheckpointError: E400, E401, E405 as `verify_checkpoint`; E403 another topology; E404 the
            policy has other tensors.
    """
    state = verify_checkpoint(path) if fingerprint is None else _read_verified(path, fingerprint)
    if dict(state.topology) != dict(topology):
        raise CheckpointError(
            "E403",
            f"checkpoint {path} was written by trainer processes {dict(state.topology)}, "
            f"this run has {dict(topology)}",
            why="a checkpoint is laid out for its own number of processes",
            fix="set train.parallel to the checkpoint's, or start from its export",
        )
    moments = optimizer.own_state(_load_file(path / OPTIMIZER))
    generators = random_state.of_rank(_load_file(path / RANDOM), rank)
    content = json.loads((path / STATE).read_text())
    values = content["random_of_ranks"][rank - 1] if rank else content["random"]
    optimizer.check_state(moments)
    load_weights(path, module, adapter, verified=True)
    optimizer.load_state(moments, state.num_updates)
    random_state.restore(generators, values)
    return state


def checkpoint_fingerprint(path: Path) -> str:
    """sha256 of the file that holds the hashes of all others."""
    return file_sha256(path / COMPLETE)


def _read_verified(path: Path, fingerprint: str) -> TrainerState:
    """The state of a checkpoint that another rank has verified.

    Raises:
        CheckpointError: E406, this rank sees another checkpoint.
    """
    try:
        found = checkpoint_fingerprint(path)
    except OSError as error:
        found = f"none ({error.strerror})"
    if found != fingerprint:
        raise CheckpointError(
            "E406",
            f"checkpoint {path} has the fingerprint {found}, the leader's has {fingerprint}",
            why="the processes of the trainer would continue from different states",
            fix="put the run on a disk that all of them see",
            path=str(path),
        )
    return TrainerState(**json.loads((path / STATE).read_text())["state"])


def load_weights(
    path: Path, module: nn.Module, adapter: FamilyAdapter, *, verified: bool = False
) -> None:
    """Only the policy of a checkpoint: what `model.checkpoint` starts a run from.

    Raises:
        CheckpointError: E400, E401, E405 as `verify_checkpoint`; E404 other tensors. The module is
            unchanged then.
    """
    if not verified:
        verify_checkpoint(path)
    try:
        adapter.load_tensors(module, _load_file(path / WEIGHTS))
    except EngineError as error:
        raise CheckpointError(
            "E404",
            f"the weights of checkpoint {path} do not fit this policy: {error.what}",
            why="the policy has another shape or dtype than the one that was saved",
            fix="use the [model] table that the checkpoint was written with",
            **error.details,
        ) from error


def _write(
    directory: Path,
    state: TrainerState,
    module: nn.Module,
    optimizer: PolicyOptimizer,
    adapter: FamilyAdapter,
    ranks: Ranks,
) -> None:
    assert state.num_updates == optimizer.num_updates
    tensors, values = random_state.capture()
    others = [ranks.receive(rank) for rank in range(1, ranks.world)]
    tensors = random_state.of_all_ranks([tensors, *(message.tensors for message in others)])
    weights = _write_gathered(
        directory / WEIGHTS,
        lambda: adapter.publication_layout(module),
        adapter.publication_tensors(module),
        ranks,
    )
    moments = _write_gathered(
        directory / OPTIMIZER,
        optimizer.whole_state_layout,
        optimizer.whole_state_tensors(),
        ranks,
    )
    written = [weights, moments, write_tensors(directory / RANDOM, tensors)]
    content = {
        "state": asdict(state),
        "random": values,
        **({"random_of_ranks": [dict(message.values) for message in others]} if others else {}),
        "num_tensors": {WEIGHTS: len(weights.tensors), OPTIMIZER: len(moments.tensors)},
    }
    text = (json.dumps(content, sort_keys=True, allow_nan=False) + "\n").encode()
    (directory / STATE).write_bytes(text)
    written.append(WrittenFile(STATE, len(text), file_sha256(directory / STATE), {}))
    files = {file.name: {"size": file.num_bytes, "sha256": file.sha256} for file in written}
    complete = {"schema": SCHEMA, "files": files}
    (directory / COMPLETE).write_text(json.dumps(complete, indent=2, sort_keys=True) + "\n")


def _write_gathered(
    path: Path,
    layout: Callable[[], Mapping[str, torch.Tensor]],
    tensors: Iterator[tuple[str, torch.Tensor]],
    ranks: Ranks,
) -> WrittenFile:
    """Gathered tensors are written one by one; tensors that are all here, without reading back."""
    if ranks.world == 1:
        return write_tensors(path, dict(tensors))
    return write_tensor_stream(path, layout(), tensors)


def _complete_steps(directory: Path) -> list[int]:
    """Steps whose files are all there in full size, ascending; cheap, for retention."""

    def is_whole(path: Path) -> bool:
        try:
            files = json.loads((path / COMPLETE).read_text())["files"]
            return all((path / name).stat().st_size == files[name]["size"] for name in _FILES)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    return [step for step, path in sorted(visible_checkpoints(directory).items()) if is_whole(path)]


def _verify_file(path: Path, complete: Mapping[str, Any]) -> None:
    try:
        expected = complete["files"][path.name]
        expected_size, expected_sha256 = int(expected["size"]), str(expected["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{COMPLETE} does not describe it") from error
    if not path.is_file():
        raise _damaged(path, "it is missing")
    size = path.stat().st_size
    if size != expected_size:
        raise _damaged(path, f"it has {size} bytes instead of {expected_size}")
    if file_sha256(path) != expected_sha256:
        raise _damaged(path, "its sha256 is not the recorded one")


def _read_json(directory: Path, name: str, code: str, reason: str) -> dict[str, Any]:
    path = directory / name
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise _damaged(path, reason if missing else f"{error}", code=code) from error
    if not isinstance(content, dict):
        raise _damaged(path, "it is not a JSON object", code=code)
    return content


def _load_file(path: Path) -> dict[str, torch.Tensor]:
    try:
        return read_tensors(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, f"{error}") from error


def _damaged(path: Path, reason: str, *, code: str = "E401") -> CheckpointError:
    word = "incomplete" if code == "E400" else "damaged"
    return CheckpointError(
        code,
        f"checkpoint {path.parent} is {word}: {path.name}: {reason}",
        why="resuming from it would continue from another state than the one that was trained",
        fix="resume from an older checkpoint of the run",
        path=str(path),
    )
