"""Checks of `model.checkpoint`: whether it is whole, and whether it speaks the data's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_olmo.base.errors import InputError
from miles_olmo.base.rundir import RunDirectory, run_of_checkpoint
from miles_olmo.manifest.hugging_face import CONFIG
from miles_olmo.manifest.models import Manifest
from miles_olmo.plan.checks.finding import Finding
from miles_olmo.plan.checks.inputs import Inspection, similar_name
from miles_olmo.plan.hashing import local_input
from miles_olmo.tasks.tokenizer import read_tokenizer

CHECKPOINT_MARK = "complete.json"
"""The file that a save writes last: a checkpoint directory without it is torn."""

_TOKENIZER = "tokenizer.json"


def checkpoint_input(m: Manifest, base: Path, result: Inspection) -> None:
    """Hash and check `model.checkpoint`, if the run starts from one."""
    written = m.model.checkpoint
    if written is None:
        return
    path = base / written
    if (path / CONFIG).is_file():
        result.findings += _hugging_face_weights(path, written)
    elif not (path / CHECKPOINT_MARK).is_file():
        missing = f"it has neither {CHECKPOINT_MARK} nor {CONFIG}, so it is no complete checkpoint"
        result.findings.append(
            Finding(
                "E123",
                ("model.checkpoint",),
                f"model.checkpoint = '{written}' is not a checkpoint",
                missing if path.is_dir() else f"there is no directory {path}",
                similar_name(path) or "name a directory such as runs/<id>/checkpoints/step-000080",
            )
        )
        return
    result.inputs.append(local_input("model.checkpoint", written, base))
    result.findings += _other_vocabulary(m, base, result.vocabulary)


def _hugging_face_weights(path: Path, written: str) -> Iterator[Finding]:
    """The weight files that a Hugging Face directory lacks."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    what = f"model.checkpoint = '{written}' lacks weights"
    fix = "download or copy the whole checkpoint, as safetensors"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{index.name} cannot be read: {error}"
            yield Finding("E174", ("model.checkpoint",), what, why, fix)
            return
        missing = sorted(name for name in names if not (path / name).is_file())
        if missing:
            why = f"{index.name} names {len(missing)} files that are not there, first {missing[0]}"
            yield Finding("E174", ("model.checkpoint",), what, why, fix)
    elif not single.is_file():
        why = f"it has neither {single.name} nor {index.name}"
        yield Finding("E174", ("model.checkpoint",), what, why, fix)


def _other_vocabulary(
    m: Manifest, base: Path, vocabulary: Mapping[str, int] | None
) -> Iterator[Finding]:
    """Tokens of the checkpoint's own tokenizer that data.tokenizer lacks or numbers otherwise.

    Tokens that data.tokenizer has beside them are welcome: a vocabulary may have been extended.
    """
    file = own_tokenizer(base / str(m.model.checkpoint))
    if vocabulary is None or file is None or _same_bytes(file, base / m.data.tokenizer):
        return
    keys = ("data.tokenizer", "model.checkpoint")
    try:
        own = read_tokenizer(file).get_vocab(with_added_tokens=True)
    except InputError as error:
        fix = "restore that file: it says what the ids that the weights know stand for"
        yield Finding("E178", keys, f"model.checkpoint: {error.what}", error.why, fix)
        return
    others = [token for token, number in own.items() if vocabulary.get(token) != number]
    if others:
        first = min(others, key=own.__getitem__)
        found = f"the id {vocabulary[first]}" if first in vocabulary else "no id"
        yield Finding(
            "E178",
            keys,
            f"data.tokenizer = '{m.data.tokenizer}' is not the tokenizer of model.checkpoint: "
            f"{len(others)} of {len(own)} tokens differ, first {first!r}, which has {found} instead "
            f"of {own[first]}",
            "the weights would read other text than they were trained on",
            f"set tokenizer to {file} in [data]; if the vocabulary was changed on purpose, put the "
            "new file there",
        )


def own_tokenizer(checkpoint: Path) -> Path | None:
    """The `tokenizer.json` that a checkpoint was trained with, where it has left one."""
    run = run_of_checkpoint(checkpoint)
    if run is not None:
        return _tokenizer_of_run(run)
    beside = (checkpoint / _TOKENIZER, checkpoint / "tokenizer" / _TOKENIZER)
    return next((file for file in beside if file.is_file()), None)


def _tokenizer_of_run(run: RunDirectory) -> Path | None:
    try:
        plan: Any = json.loads(run.plan.read_bytes())
        entry = next(i for i in plan["content"]["inputs"] if i["key"] == "data.tokenizer")
        produced = entry["kind"] == "produced"
        folder = run.root / "data" if produced else Path(plan["local"]["base_directory"])
        file = folder / entry["path"]
    except (OSError, ValueError, KeyError, TypeError, StopIteration):  # E173 names what is wrong
        return None
    return file if file.is_file() else None


def _same_bytes(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()
