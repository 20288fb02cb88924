"""The tokenizer wrapper and the generated character tokenizer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_olmo.base.errors import InputError
from miles_olmo.tasks import reversed_digits
from miles_olmo.tasks.chat import Message, render_prompt
from miles_olmo.tasks.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer(
    reversed_digits.build_tokenizer(), bos_token="<bos>", eos_token="<eos>", source="t.json"
)


@given(st.text(alphabet=reversed_digits.SYMBOLS, max_size=60))
def test_every_text_of_known_symbols_survives_the_round_trip(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode_many([text, text]) == [ids, ids]


def test_special_tokens_have_ids_and_are_decoded():
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id) == (1, 2)
    assert TOKENIZER.decode([7, 8, TOKENIZER.eos_id]) == "45<eos>"
    assert TOKENIZER.vocab_size == 48


def test_an_unknown_symbol_is_an_error_and_not_dropped():
    with pytest.raises(InputError) as caught:
        TOKENIZER.encode("rev É=")
    assert caught.value.code == "E130"


def test_a_token_that_the_vocabulary_lacks_is_named():
    with pytest.raises(InputError, match=r"'<end>' is not in t\.json") as caught:
        TextTokenizer(reversed_digits.build_tokenizer(), eos_token="<end>", source="t.json")
    assert caught.value.code == "E127"


@pytest.mark.parametrize("content", [None, "", "{}", "not json"])
def test_a_file_that_is_not_a_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=r"tokenizer\.json") as caught:
        TextTokenizer.from_file(path, eos_token="<eos>")
    assert caught.value.code == "E125"


def test_templates_render_messages():
    messages = [Message("system", "be brief"), Message("user", "rev 1=")]
    assert render_prompt(messages, "plain") == "be brief\nrev 1="
    assert render_prompt(messages, "chatml") == (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\nrev 1=<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
