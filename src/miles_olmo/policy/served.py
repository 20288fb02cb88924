"""The directory that a vLLM engine serves from: everything of an export but the weights.

    config.json, generation_config.json, tokenizer.json, tokenizer_config.json
    policy_tensors.json           names, dtypes and shapes that every publication must hold

Weights come by publication, so an engine starts with none.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from miles_olmo.manifest.models import Model
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.atomic_directory import atomic_directory
from miles_olmo.policy.export import write_description
from miles_olmo.policy.export_tokenizer import ExportTokenizer
from miles_olmo.policy.tensor_files import dtype_name
from miles_olmo.wire.publication import EXPECTED_NAME, ExpectedTensor, write_expected


def write_served(model: Model, tokenizer: ExportTokenizer, directory: Path) -> None:
    """Write the directory of an engine, replacing one that is there.

    Raises:
        CheckpointError: E431, the policy has no Hugging Face form; E433, the tokenizer does not fit.
        OSError: the files could not be written.
    """
    adapter = adapter_for(model.family)
    module = adapter.build(model, None, device=torch.device("meta"), seed=0)
    with atomic_directory(directory, durable=False) as writing:
        write_description(writing, model, tokenizer)
        config = json.loads((writing / "config.json").read_text())
        config.pop("auto_map", None)  # the engine has its own code for the family
        (writing / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        expected = {
            name: ExpectedTensor(dtype_name(tensor.dtype), tuple(tensor.shape))
            for name, tensor in adapter.publication_tensors(module)
        }
        write_expected(writing / EXPECTED_NAME, expected)
