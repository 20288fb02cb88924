"""The tokenizer of an export or a conversion: a `tokenizer.json`, byte for byte, and its special tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_olmo.base.errors import CheckpointError, InputError
from miles_olmo.tasks.tokenizer import read_tokenizer

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class ExportTokenizer:
    """Which tokenizer goes into an export."""

    file: Path
    """A `tokenizer.json` (Hugging Face tokenizers)."""
    eos_token: str
    """Ends a response."""
    bos_token: str | None = None
    """Put before every prompt; none when None."""
    pad_token: str | None = None
    """Fills batches; the eos token when None."""
    chat_template: str | None = None
    """Jinja template for `apply_chat_template`; none is written when None."""


@dataclass(frozen=True)
class SpecialTokenIds:
    """Ids for config.json and generation_config.json."""

    bos: int | None
    eos: int | list[int] | None
    pad: int | None


@dataclass(frozen=True)
class CopiedTokenizer:
    """The tokenizer files of another checkpoint, taken over byte for byte."""

    folder: Path
    """Holds any of `TOKENIZER_FILES`."""
    ids: SpecialTokenIds


TokenizerSource = ExportTokenizer | CopiedTokenizer

GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    GENERATION,  # not the tokenizer's, but goes with its special tokens
)


def check_copied_tokenizer(source: CopiedTokenizer, *, vocab_size: int) -> None:
    """Whether the tokenizer files of a checkpoint fit the model beside them.

    Raises:
        CheckpointError: E433, a file cannot be read, or an id lies beyond the vocabulary.
    """
    file = source.folder / "tokenizer.json"
    if file.is_file():
        _read_fitting(file, vocab_size)
    _check_ids(asdict(source.ids), source.folder, vocab_size)
    generation = source.folder / GENERATION
    if generation.is_file():
        _check_ids(_named_ids(generation), generation, vocab_size)


def _named_ids(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {name: content.get(f"{name}_token_id") for name in ("bos", "eos", "pad")}
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise _unfit(file, f"it cannot be read: {error}") from error


def _check_ids(ids: Mapping[str, Any], file: Path, vocab_size: int) -> None:
    for name, value in ids.items():
        listed = value if name == "eos" and isinstance(value, list) else [value]
        for number in listed:
            if number is None and listed is not value:
                continue
            if type(number) is not int or not 0 <= number < vocab_size:
                raise _unfit(file, f"{name}_token_id = {value!r} with {vocab_size} token ids")


def _read_fitting(file: Path, vocab_size: int) -> tokenizers.Tokenizer:
    """A tokenizer whose ids all are in the vocabulary."""
    try:
        tokenizer = read_tokenizer(file)
    except InputError as error:
        raise _unfit(file, f"it cannot be read: {error.why}") from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise _unfit(
            file, f"it has token ids up to {largest}, the policy only {vocab_size} of them"
        )
    return tokenizer


def copy_tokenizer(source: Path, destination: Path) -> list[str]:
    """Copy the tokenizer files that `source` has; returns their names."""
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, destination / name)
    return names


def write_tokenizer(
    source: TokenizerSource,
    directory: Path,
    *,
    vocab_size: int,
    max_length: int,
) -> SpecialTokenIds:
    """Write tokenizer.json and tokenizer_config.json, loadable by `PreTrainedTokenizerFast`.

    Raises:
        CheckpointError: E433, the file is no tokenizer, lacks a named token, or has ids beyond the
            vocabulary.
        OSError: the files could not be read or written.
    """
    if isinstance(source, CopiedTokenizer):
        check_copied_tokenizer(source, vocab_size=vocab_size)
        copy_tokenizer(source.folder, directory)
        return source.ids
    source.file.stat()  # a file that is not there is no fault of its content
    tokenizer = _read_fitting(source.file, vocab_size)

    def token_id(token: str) -> int:
        found = tokenizer.token_to_id(token)
        if found is None:
            raise _unfit(source.file, f"it has no token {token!r}")
        return found

    pad_token = source.pad_token or source.eos_token
    ids = SpecialTokenIds(
        bos=None if source.bos_token is None else token_id(source.bos_token),
        eos=token_id(source.eos_token),
        pad=token_id(pad_token),
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": source.bos_token,
        "eos_token": source.eos_token,
        "pad_token": pad_token,
        "chat_template": source.chat_template,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    written = {key: value for key, value in config.items() if value is not None}
    shutil.copyfile(source.file, directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text(json.dumps(written, indent=2) + "\n")
    return ids


def _unfit(file: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "E433",
        f"{file} does not fit the model: {reason}",
        why="text would become other ids than the policy was trained on, or ids that it does not have",
        fix="use the tokenizer and the special tokens that the policy was trained with",
        path=str(file),
    )
