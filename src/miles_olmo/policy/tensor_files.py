"""Safetensors files, written tensor by tensor with checksums taken on the way.

The format (https://github.com/huggingface/safetensors) is a little-endian u64 header length, a JSON
header padded with spaces to 8 bytes, then the tensors' bytes without gaps. Writing it here means
ordinary file errors (a full disk is an OSError), no second copy of the policy in memory, and
one sha256 per tensor and per file without reading anything back. Files are read with `safetensors`.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from miles_olmo.base.canonical import file_sha256

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One safetensors file on disk."""

    name: str
    """File name without directory."""
    num_bytes: int
    sha256: str | None
    """Over the whole file; None when it was not asked for."""
    tensors: Mapping[str, str]
    """sha256 of each tensor's contiguous little-endian bytes, by tensor name."""


def dtype_name(dtype: torch.dtype) -> str:
    """safetensors' name of a dtype, e.g. "BF16"."""
    return _DTYPES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """Inverse of `dtype_name`."""
    return next(dtype for dtype, known in _DTYPES.items() if known == name)


def file_groups(
    tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Consecutive tensors up to `max_bytes` per group; a larger tensor has a group of its own.

    No tensor is asked for before its group is.
    """
    group: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if group and num_bytes + size > max_bytes:
            yield group
            group, num_bytes = {}, 0
        group[name] = tensor
        num_bytes += size
    if group:
        yield group


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    hash_file: bool = True,
) -> WrittenFile:
    """Write tensors, of any device and stride, to a new file at `path`.

    Args:
        metadata: Text values for the header, e.g. {"format": "pt"}, which transformers looks for.
        hash_file: Take the sha256 of the file, too; each tensor's is taken anyway.

    Raises:
        OSError: the file could not be written; a part of it may be left.
    """
    assert sys.byteorder == "little", "safetensors files are little-endian"
    order = _file_order(tensors)
    header = _header(order, tensors, metadata)
    file_hash = hashlib.sha256(header) if hash_file else None
    tensor_hashes: dict[str, str] = {}
    num_bytes = len(header)
    with path.open("wb") as file:
        file.write(header)
        for name in order:
            data = tensor_bytes(tensors[name])
            file.write(data)
            if file_hash is not None:
                file_hash.update(data)
            tensor_hashes[name] = hashlib.sha256(data).hexdigest()
            num_bytes += len(data)
    sha256 = None if file_hash is None else file_hash.hexdigest()
    return WrittenFile(path.name, num_bytes, sha256, tensor_hashes)


def write_tensor_stream(
    path: Path, layout: Mapping[str, torch.Tensor], tensors: Iterable[tuple[str, torch.Tensor]]
) -> WrittenFile:
    """The same file as `write_tensors`, from tensors that come one by one in any order.

    Only one of them is in memory at a time; the file is read once more for its sha256.

    Args:
        layout: Tensors of the right dtypes and shapes, e.g. on the meta device.
        tensors: All of them, once each.

    Raises:
        OSError: the file could not be written; a part of it may be left.
    """
    order = _file_order(layout)
    header = _header(order, layout, None)
    offsets, end = {}, len(header)
    for name in order:
        offsets[name] = end
        end += layout[name].numel() * layout[name].element_size()
    tensor_hashes: dict[str, str] = {}
    with path.open("wb") as file:
        file.write(header)
        for name, tensor in tensors:
            assert (tensor.shape, tensor.dtype) == (layout[name].shape, layout[name].dtype), name
            data = tensor_bytes(tensor)
            file.seek(offsets[name])
            file.write(data)
            tensor_hashes[name] = hashlib.sha256(data).hexdigest()
    assert tensor_hashes.keys() == layout.keys(), "a tensor did not come"
    return WrittenFile(path.name, end, file_sha256(path), tensor_hashes)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, on the CPU.

    Raises:
        OSError, safetensors.SafetensorError: the file is missing or not a safetensors file.
    """
    from safetensors.torch import load_file

    return load_file(path)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite.

    From the smallest and the largest element, which are NaN if any is: one pass over the memory and
    no mask of its size, a tenth of the time of `torch.isfinite(tensor).all()`.
    """
    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())
    return math.isfinite(low.item()) and math.isfinite(high.item())


def tensor_sha256(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's contiguous little-endian bytes."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Contiguous little-endian bytes of a tensor; a view of its memory where that is possible."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _file_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Wide dtypes first: this keeps every tensor aligned to its own item size."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _header(
    order: list[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
