"""The task `reversed_digits`: `rev 1234=` is answered by `4321`.

Small enough that a model of a million parameters learns it on a laptop, and real enough to exercise
everything: a JSONL data set, a tokenizer file, a verifier. Files depend on the parameters alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from miles_olmo.base.seeds import derive_seed
from miles_olmo.manifest.models import PrepareData

if TYPE_CHECKING:
    import tokenizers

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
SYMBOLS = "0123456789+-=*% abcdefghijklmnopqrstuvwxyz:?>"
VERIFIER = "exact_match"


def vocabulary() -> dict[str, int]:
    """Token to id: the special tokens, then one token per symbol."""
    return {token: index for index, token in enumerate([*SPECIAL_TOKENS, *SYMBOLS])}


def build_tokenizer() -> tokenizers.Tokenizer:
    """A character-level tokenizer; a symbol outside the vocabulary is an error, not an unknown token."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    # unk_token names a token that is deliberately absent, so that encoding an unknown symbol raises.
    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def tokenizer_json() -> bytes:
    """The bytes of `tokenizer.json`."""
    return (build_tokenizer().to_str(pretty=True) + "\n").encode()


def question(number: int, digits: int) -> tuple[str, str]:
    """Prompt and ground truth, e.g. `("rev 0042=", "2400")`."""
    text = f"{number:0{digits}d}"
    return f"rev {text}=", text[::-1]


def data_files(spec: PrepareData) -> tuple[bytes, bytes]:
    """JSONL bytes of the training and the evaluation file; no question is in both, none is repeated.

    Raises:
        ValueError: there are fewer numbers of that many digits than rows.
    """
    if spec.num_train + spec.num_evaluation > 10**spec.digits:
        raise ValueError(f"there are only {10**spec.digits} numbers of {spec.digits} digits")
    numbers = _distinct_numbers(spec)
    lines = [_line(next(numbers), spec.digits) for _ in range(spec.num_train + spec.num_evaluation)]
    return b"".join(lines[: spec.num_train]), b"".join(lines[spec.num_train :])


def _distinct_numbers(spec: PrepareData) -> Iterator[int]:
    seen: set[int] = set()
    draw = 0
    while True:
        number = derive_seed(spec.seed, "reversed_digits", spec.digits, draw) % 10**spec.digits
        draw += 1
        if number not in seen:
            seen.add(number)
            yield number


def _line(number: int, digits: int) -> bytes:
    prompt, truth = question(number, digits)
    row = {
        "messages": [{"role": "user", "content": prompt}],
        "ground_truth": truth,
        "dataset": VERIFIER,
    }
    return (json.dumps(row) + "\n").encode()
