"""The tokenizer of an export: the run's own `tokenizer.json`, byte for byte, and its special tokens."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from miles_olmo.base.errors import CheckpointError


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
        CheckpointError: E433, the file is no tokenizer, lacks a named token, or is too large.
        OSError: the files could not be read or written.
    """
    if isinstance(source, CopiedTokenizer):
        copy_tokenizer(source.folder, directory)
        return source.ids
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(source.file.read_text(encoding="utf-8"))
    except OSError:
        raise
    except Exception as error:  # the library raises plain Exception for a malformed file
        raise _unfit(source.file, f"it cannot be read: {error}") from error
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size > vocab_size:
        raise _unfit(source.file, f"it has {size} tokens, the policy only {vocab_size}")

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
        f"tokenizer {file} cannot go into the export: {reason}",
        why="the export would decode other text than the policy was trained on",
        fix="name the tokenizer and the special tokens that the run used",
        path=str(file),
    )
