"""Chat templates: messages to the text of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

TemplateName = Literal["plain", "chatml"]

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
"""Tokens that the chatml template needs in the vocabulary."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


def render_prompt(messages: Sequence[Message], template: TemplateName) -> str:
    """The text that the policy continues.

    plain: contents joined by newlines. chatml: `<|im_start|>role\\ncontent<|im_end|>\\n` for each
    message, then an opened assistant turn.
    """
    if template == "plain":
        return "\n".join(message.content for message in messages)
    turns = [f"<|im_start|>{m.role}\n{m.content}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
