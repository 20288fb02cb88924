"""A published policy version: the list of every tensor, with checksums, beside the files.

Layout of a publication directory:

    publish/v000012/
      publication.json     this manifest, written last
      weights-00001.safetensors ...
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

MANIFEST_NAME = "publication.json"

EXPECTED_NAME = "policy_tensors.json"
"""In a directory that an engine serves from: the tensors that every publication must hold."""


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """One tensor of the policy under its Hugging Face name."""

    name: str
    dtype: str
    """safetensors' name of the dtype, e.g. "F32", "BF16"."""
    shape: tuple[int, ...]
    sha256: str
    """Over the contiguous little-endian bytes."""
    file: str
    """File name inside the publication directory."""


@dataclass(frozen=True, slots=True)
class Publication:
    """Every tensor of one policy version, each exactly once."""

    version: int
    directory: str
    """Absolute path of the publication directory."""
    tensors: tuple[PublishedTensor, ...]

    @property
    def checksums(self) -> dict[str, str]:
        return {tensor.name: tensor.sha256 for tensor in self.tensors}

    @property
    def paths(self) -> list[str]:
        return [str(Path(self.directory) / name) for name in sorted({t.file for t in self.tensors})]

    def update_info(self) -> dict[str, Any]:
        """The body of `/update_weights`: vLLM's fields, plus paths, version and checksums."""
        return {
            "names": [tensor.name for tensor in self.tensors],
            "dtype_names": [tensor.dtype for tensor in self.tensors],
            "shapes": [list(tensor.shape) for tensor in self.tensors],
            "paths": self.paths,
            "weight_version": self.version,
            "checksums": self.checksums,
        }

    def as_json(self) -> dict[str, Any]:
        # Not `asdict`: it copies every value, which shows at each publication.
        names = [field.name for field in fields(PublishedTensor)]
        tensors = [{name: getattr(tensor, name) for name in names} for tensor in self.tensors]
        return {"version": self.version, "tensors": tensors}

    @classmethod
    def read(cls, directory: Path) -> Publication:
        """Read `publication.json` of a complete publication."""
        content = json.loads((directory / MANIFEST_NAME).read_text())
        tensors = tuple(
            PublishedTensor(**{**tensor, "shape": tuple(tensor["shape"])})
            for tensor in content["tensors"]
        )
        return cls(content["version"], str(directory.resolve()), tensors)


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """What a tensor of the policy must look like, whatever its values."""

    dtype: str
    """safetensors' name of the dtype."""
    shape: tuple[int, ...]


def write_expected(path: Path, expected: Mapping[str, ExpectedTensor]) -> None:
    """Write the tensors that an engine must be sent, by Hugging Face name."""
    content = {name: asdict(tensor) for name, tensor in expected.items()}
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def read_expected(path: Path) -> dict[str, ExpectedTensor]:
    """Inverse of `write_expected`."""
    content = json.loads(path.read_text())
    return {
        name: ExpectedTensor(tensor["dtype"], tuple(tensor["shape"]))
        for name, tensor in content.items()
    }
