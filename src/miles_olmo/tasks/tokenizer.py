"""A `tokenizer.json` with the few things that training asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from miles_olmo.base.errors import InputError

if TYPE_CHECKING:
    import tokenizers

    from miles_olmo.manifest.models import Data


class TextTokenizer:
    """Text to token ids and back; never adds a token by itself.

    Args:
        tokenizer: The Hugging Face tokenizer.
        eos_token: Token that ends a response.
        bos_token: Token put before every prompt, or None.
        source: Where it came from, for messages.

    Raises:
        InputError: E127, one of the two tokens is not in the vocabulary.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        eos_token: str,
        bos_token: str | None = None,
        source: str = "tokenizer",
    ) -> None:
        self._tokenizer = tokenizer
        self.source = source
        self.eos_token = eos_token
        self.bos_token = bos_token
        self.eos_id = self.token_id(eos_token)
        self.bos_id = None if bos_token is None else self.token_id(bos_token)

    @classmethod
    def from_file(
        cls, path: Path, *, eos_token: str, bos_token: str | None = None
    ) -> TextTokenizer:
        """Read a `tokenizer.json`.

        Raises:
            InputError: E125, the file is missing or not a tokenizer; E127, a token is missing.
        """
        return cls(read_tokenizer(path), eos_token=eos_token, bos_token=bos_token, source=str(path))

    @classmethod
    def from_data(cls, path: Path, data: Data) -> TextTokenizer:
        """The tokenizer at `path`, with the special tokens that the manifest's [data] names."""
        return cls.from_file(path, eos_token=data.eos_token, bos_token=data.bos_token)

    @property
    def vocab_size(self) -> int:
        """Rows an embedding needs: the largest token id plus one."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def has_token(self, token: str) -> bool:
        return self._tokenizer.token_to_id(token) is not None

    def token_id(self, token: str) -> int:
        """Id of a token.

        Raises:
            InputError: E127, the vocabulary has no such token.
        """
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None:
            raise InputError(
                "E127",
                f"token {token!r} is not in {self.source}",
                why="it would be split into several ordinary tokens",
                fix="name a token of the tokenizer",
            )
        return token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written in the text become their ids.

        Raises:
            InputError: E130, the text has a symbol that the vocabulary cannot express.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the tokenizers library raises plain Exception
            raise InputError(
                "E130",
                f"cannot encode {text[:40]!r}",
                why=f"{self.source} says: {error}",
                fix="use only symbols of the vocabulary, or another tokenizer",
            ) from error

    def encode_many(self, texts: Sequence[str]) -> list[list[int] | InputError]:
        """Like `encode` for every text; a text that cannot be encoded yields its error."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        except Exception:  # one bad text fails the batch: find out which
            return [self._encode_or_error(text) for text in texts]

    def _encode_or_error(self, text: str) -> list[int] | InputError:
        try:
            return self.encode(text)
        except InputError as error:
            return error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a `tokenizer.json`.

    Raises:
        InputError: E125, the file is missing or not a tokenizer.
    """
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise InputError(
            "E125",
            f"cannot read the tokenizer {path}",
            why=str(error),
            fix="name a tokenizer.json of the Hugging Face tokenizers library",
        ) from error
