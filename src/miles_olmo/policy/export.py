"""A Hugging Face checkpoint of a policy, checked by its logits on every export.

    export/
      config.json, generation_config.json
      model.safetensors             (or model-00001-of-0000N.safetensors and an index)
      tokenizer.json, tokenizer_config.json
      configuration_olmo3moe.py, modeling_olmo3moe.py     (olmo3moe only)
      miles_export.json             where it came from, the logits check, sha256 of every file

The model code of a class that transformers does not have travels with the weights (see
`miles_olmo.policy.export_code`), so `AutoModelForCausalLM.from_pretrained(directory,
trust_remote_code=True)` works with neither miles-olmo nor OLMo-core installed.

Left out: a dtype other than the policy's own, and what the family's class cannot express.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from miles_olmo.base.canonical import file_sha256
from miles_olmo.base.errors import CheckpointError
from miles_olmo.base.seeds import derive_seed
from miles_olmo.manifest.hugging_face import FAMILIES, write_hugging_face
from miles_olmo.manifest.models import Model
from miles_olmo.policy.atomic_directory import atomic_directory, remove_leftovers
from miles_olmo.policy.export_code import (
    CONFIG_CLASS,
    MODEL_CLASS,
    config_class,
    load_hugging_face,
    refusals_of_the_class,
    write_model_code,
)
from miles_olmo.policy.export_tokenizer import (
    GENERATION,
    SpecialTokenIds,
    TokenizerSource,
    write_tokenizer,
)
from miles_olmo.policy.tensor_files import file_groups, write_tensors

_CPU = torch.device("cpu")
SCHEMA = "miles-olmo/export/v1"
REPORT = "miles_export.json"
MAX_FILE_BYTES = 4 * 1024**3

LOGITS_BOUND = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest |difference| of a token's logits as a share of max(1, largest |logit|): a few roundings of
the dtype, as the sums inside attention and experts run in another order."""

MAX_SHARE_BEYOND = {"float32": 0.0, "bfloat16": 0.1}
"""Share of tokens that may be beyond the bound: in bfloat16, rounding can send a token whose experts
are nearly tied to another expert. A wrong export is wrong at nearly every token."""


@dataclass(frozen=True)
class LogitsCheck:
    """How far the export's logits are from the policy's."""

    max_abs_difference: float
    """Over every position and vocabulary entry."""
    max_abs_logit: float
    bound: float
    """Largest difference of a token: `LOGITS_BOUND` of the dtype x max(1, max_abs_logit)."""
    num_tokens: int
    num_tokens_beyond: int
    """Tokens beyond the bound; at most `MAX_SHARE_BEYOND` of the dtype."""
    seed: int
    """Of the random token batches."""


def export_policy(
    tensors: Mapping[str, torch.Tensor],
    model: Model,
    tokenizer: TokenizerSource,
    directory: Path,
    *,
    core_logits: Callable[[torch.Tensor], torch.Tensor],
    plan_digest: str | None,
    step: int | None,
    check_dtype: str | None = None,
    device: torch.device = _CPU,
    seed: int = 0,
) -> dict[str, Any]:
    """Write the policy to `directory` and check that it reads back as the same policy.

    The directory appears only when the check has passed; one that is there is replaced.

    Args:
        tensors: Every tensor of the policy, under its Hugging Face name.
        core_logits: Logits of the policy for token ids int64 [B, T]: float [B, T, V].
        check_dtype: In which the export is read back for the check, the dtype of `core_logits`; the
            model's when None.
        device: Where the check runs; `core_logits` gets its ids there.
        plan_digest: Plan of the run that trained the weights; None for weights of no run.
        step: Training step of the weights; None for weights of no run.
        seed: Of the token batches that are compared.

    Returns:
        The content of `miles_export.json`.

    Raises:
        CheckpointError: E410 or E431, the policy cannot be expressed; E430, its logits differ;
            E432, the files could not be written; E433, the tokenizer does not fit.
    """
    try:
        remove_leftovers(directory.parent, re.escape(directory.name))
        with atomic_directory(directory) as writing:
            _write_files(writing, tensors, model, tokenizer)
            dtype = check_dtype or model.dtype
            check = check_logits(writing, model, core_logits, dtype=dtype, device=device, seed=seed)
            report = {
                "schema": SCHEMA,
                "plan_digest": plan_digest,
                "step": step,
                "family": model.family,
                "dtype": model.dtype,
                "logits_check": asdict(check),
                "versions": _versions(),
                "files": {path.name: file_sha256(path) for path in sorted(writing.iterdir())},
            }
            (writing / REPORT).write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise CheckpointError(
            "E432",
            f"export {directory} could not be written: {error.strerror or error}",
            why="an export needs room for one copy of the weights",
            fix="free disk space or choose another directory; the checkpoint is untouched",
            path=str(directory),
            errno=error.errno,
        ) from error
    return report


def _write_files(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    model: Model,
    tokenizer: TokenizerSource,
) -> None:
    write_description(directory, model, tokenizer)
    if model.family == "olmo3moe":
        write_model_code(directory)
    _write_weights(directory, tensors)


def write_description(directory: Path, model: Model, tokenizer: TokenizerSource) -> None:
    """Write configuration and tokenizer: all that a program must know before it has weights.

    Raises:
        CheckpointError: E431, the policy has no Hugging Face form; E433, the tokenizer does not fit.
    """
    shape = model.shape
    ids = write_tokenizer(
        tokenizer,
        directory,
        vocab_size=shape.vocab_size,
        max_length=shape.max_position_embeddings,
    )
    _write_config(directory, model, ids)


def _write_config(directory: Path, model: Model, ids: SpecialTokenIds) -> None:
    token_ids = {"bos_token_id": ids.bos, "eos_token_id": ids.eos, "pad_token_id": ids.pad}
    config = config_class(model.family)(**write_hugging_face(model), **token_ids)
    architecture = FAMILIES[model.family].architecture
    config.update({"architectures": [architecture], "dtype": model.dtype})
    content = json.loads(config.to_json_string(use_diff=False))
    if model.family == "olmo3moe":
        content["auto_map"] = {"AutoConfig": CONFIG_CLASS, "AutoModelForCausalLM": MODEL_CLASS}
    (directory / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    if (directory / GENERATION).exists():  # copied from another checkpoint
        return
    generation = {key: value for key, value in token_ids.items() if value is not None}
    text = json.dumps(generation, indent=2, sort_keys=True) + "\n"
    (directory / GENERATION).write_text(text)


def _write_weights(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    groups = list(file_groups(tensors.items(), MAX_FILE_BYTES))
    if len(groups) == 1:
        write_tensors(directory / "model.safetensors", tensors, {"format": "pt"})
        return
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_tensors(directory / name, group, {"format": "pt"})
        weight_map |= dict.fromkeys(group, name)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / "model.safetensors.index.json").write_text(text)


def check_logits(
    directory: Path,
    model: Model,
    core_logits: Callable[[torch.Tensor], torch.Tensor],
    *,
    dtype: str,
    device: torch.device = _CPU,
    rounded_to: str | None = None,
    code: str = "E430",
    seed: int = 0,
) -> LogitsCheck:
    """Compare the policy with what a user of a Hugging Face checkpoint would load.

    Args:
        directory: The checkpoint.
        dtype: In which it is loaded, the dtype of `core_logits`.
        device: Where both run; `core_logits` gets its ids there.
        rounded_to: Narrower dtype that the checkpoint's weights are rounded to after loading, as those
            on the other side were.
        code: Of the error.

    Raises:
        CheckpointError: E430 (or `code`), the logits differ; E431, the class has other tensors; E448, the
            class cannot be built or run.
    """
    exported = load_hugging_face(directory, model.family, dtype).to(device)
    if rounded_to not in (None, dtype):
        with torch.no_grad():
            for parameter in exported.parameters():
                parameter.copy_(parameter.to(getattr(torch, rounded_to)))
    differences, largest = [], 0.0
    # Not inference_mode: tables that the policy caches on the way must stay usable for training.
    with torch.no_grad():
        for ids_BT in _token_batches(model, seed):
            ids_BT = ids_BT.to(device)
            ours_BTV = core_logits(ids_BT).float()
            with refusals_of_the_class(directory):
                theirs_BTV = exported(input_ids=ids_BT, use_cache=False).logits.float()
            differences.append((ours_BTV - theirs_BTV).abs().amax(-1).flatten())
            largest = max(largest, ours_BTV.abs().max().item())
    difference_N = torch.cat(differences)
    bound = LOGITS_BOUND[dtype] * max(1.0, largest)
    check = LogitsCheck(
        max_abs_difference=difference_N.max().item(),
        max_abs_logit=largest,
        bound=bound,
        num_tokens=difference_N.numel(),
        num_tokens_beyond=int((~(difference_N <= bound)).sum()),  # NaN is beyond
        seed=seed,
    )
    if check.num_tokens_beyond > MAX_SHARE_BEYOND[dtype] * check.num_tokens:
        raise CheckpointError(
            code,
            "the Hugging Face checkpoint's logits differ from the policy's by up to "
            f"{check.max_abs_difference:.3g}, by more than {bound:.3g} at "
            f"{check.num_tokens_beyond} of {check.num_tokens} tokens",
            why="its users would run another policy than the one on the other side",
            fix="use the tested versions of torch, transformers and ai2-olmo-core",
            # Text, since NaN is not JSON.
            **{key: str(value) for key, value in asdict(check).items()},
        )
    return check


def assist_logits_check(
    model: Model,
    core_logits: Callable[[torch.Tensor], torch.Tensor],
    *,
    device: torch.device,
    seed: int = 0,
) -> None:
    """What the other ranks of a spread policy do during `check_logits`: the same passes in order."""
    for ids_BT in _token_batches(model, seed):
        core_logits(ids_BT.to(device))


def _token_batches(model: Model, seed: int) -> list[torch.Tensor]:
    """Seeded random ids, int64 [B, T]: some rows, one token, one row of an odd length."""
    shape = model.shape
    longest = min(shape.max_position_embeddings, 64)
    generator = torch.Generator().manual_seed(derive_seed(seed, "export-logits"))
    sizes = [(4, longest), (1, 1), (1, max(1, longest - 1))]
    return [torch.randint(0, shape.vocab_size, size, generator=generator) for size in sizes]


def _versions() -> dict[str, str]:
    names = ("ai2-olmo-core", "torch", "transformers")
    return {name: importlib.metadata.version(name) for name in names}
