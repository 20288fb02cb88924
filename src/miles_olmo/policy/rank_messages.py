"""What the trainer's processes send each other: JSON values and named tensors, in one block of bytes.

    u64  length of the JSON text, little-endian
    JSON {"values": ..., "tensors": [[name, dtype, shape], ...]}, padded with spaces to 8 bytes
    the tensors' bytes in that order, each padded to 8 bytes

Nothing is pickled: a message can only become numbers, text and tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from miles_olmo.policy.tensor_files import dtype_name, dtype_of, tensor_bytes

_WORD = 8


@dataclass(frozen=True)
class Message:
    """Values and tensors from one process to another."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """They arrive in the memory of the host."""


def encode(message: Message) -> torch.Tensor:
    """A message as uint8 [N]."""
    specs = [[name, dtype_name(t.dtype), list(t.shape)] for name, t in message.tensors.items()]
    content = {"values": dict(message.values), "tensors": specs}
    text = _padded(json.dumps(content, separators=(",", ":")).encode(), b" ")
    parts = [len(text).to_bytes(_WORD, "little"), text]
    parts += [_padded(bytes(tensor_bytes(tensor)), b"\0") for tensor in message.tensors.values()]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def decode(body: torch.Tensor) -> Message:
    """Inverse of `encode`; the tensors are views of `body`."""
    start = _WORD + int.from_bytes(bytes(body[:_WORD].tolist()), "little")
    content = json.loads(bytes(body[_WORD:start].numpy().data))
    tensors = {}
    for name, dtype_text, shape in content["tensors"]:
        dtype = dtype_of(dtype_text)
        size = dtype.itemsize * torch.Size(shape).numel()
        tensors[name] = body[start : start + size].view(dtype).view(shape)
        start += size + -size % _WORD
    return Message(content["values"], tensors)


def _padded(data: bytes, filler: bytes) -> bytes:
    return data + filler * (-len(data) % _WORD)
