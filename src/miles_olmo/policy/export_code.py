"""The Hugging Face classes of each family, and the model code of an export.

`OlmoeForCausalLM` is part of transformers. For `olmo3moe` the code is OLMo-core's own files, and what
current transformers releases need.

OLMo-core ships the `olmo3moe` classes in `olmo_core.nn.moe.v2.hf`. They are copied whole; `_ADDITIONS`
is appended to the modeling file and changes nothing in this process. Names at the end of a module
win over earlier ones when functions look them up, so nothing needs to be cut out of the copy.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from miles_olmo.base.errors import CheckpointError, MilesError

CONFIG_CLASS = "configuration_olmo3moe.Olmo3MoeConfig"
MODEL_CLASS = "modeling_olmo3moe.Olmo3MoeForCausalLM"
"""File and class, as `auto_map` in config.json names them."""

_ADDITIONS = '''

# --- Added by miles-olmo -------------------------------------------------------------------------

from functools import wraps  # noqa: E402


def _create_mask_compat(mask_fn: Callable, **kwargs):  # noqa: F811
    """Call transformers' mask helpers by the names of any release: `input_embeds` became
    `inputs_embeds`, `past_key_values` became `cache`, `cache_position` went away."""
    parameters = set(signature(mask_fn).parameters)
    if "input_embeds" in parameters and "inputs_embeds" in kwargs:
        kwargs["input_embeds"] = kwargs.pop("inputs_embeds")
    if "cache" in parameters and "cache" not in kwargs:
        kwargs["cache"] = kwargs.get("past_key_values")
    return mask_fn(**{name: value for name, value in kwargs.items() if name in parameters})


def _accept_cache(forward: Callable) -> Callable:
    """Newer releases of `generate` call `past_key_values` `cache`; unknown, it would be ignored and
    every step would attend to nothing but its own token."""

    @wraps(forward)
    def forward_with_cache(self, *args, cache=None, **kwargs):
        if cache is not None:
            kwargs["past_key_values"] = cache
        return forward(self, *args, **kwargs)

    return forward_with_cache


Olmo3MoeForCausalLM.forward = _accept_cache(Olmo3MoeForCausalLM.forward)
Olmo3MoeModel.forward = _accept_cache(Olmo3MoeModel.forward)

# Routers compute in float32; without this a bfloat16 load would round a float32 router.
Olmo3MoePreTrainedModel._keep_in_fp32_modules_strict = {"router.gate"}
'''


def write_model_code(directory: Path) -> None:
    """Write configuration_olmo3moe.py and modeling_olmo3moe.py.

    Raises:
        OSError: a file could not be read or written.
    """
    import olmo_core.nn.moe.v2.hf as source

    folder = Path(next(iter(source.__path__)))
    for reference, additions in ((CONFIG_CLASS, ""), (MODEL_CLASS, _ADDITIONS)):
        name = reference.split(".")[0] + ".py"
        text = (folder / name).read_text(encoding="utf-8")
        (directory / name).write_text(text + additions, encoding="utf-8")


def config_class(family: str) -> Any:
    """The family's configuration class."""
    if family == "olmoe":
        from transformers import OlmoeConfig

        return OlmoeConfig
    from olmo_core.nn.moe.v2.hf.configuration_olmo3moe import Olmo3MoeConfig

    return Olmo3MoeConfig


def model_class(family: str) -> Any:
    """The family's model class, as exports carry it, whatever code lies beside the weights.

    OLMo-core registers its own classes with the `Auto*` factories of this process; these would win
    over the code that is exported.
    """
    if family == "olmoe":
        from transformers import OlmoeForCausalLM

        return OlmoeForCausalLM
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    with tempfile.TemporaryDirectory() as directory:
        write_model_code(Path(directory))
        return get_class_from_dynamic_module(MODEL_CLASS, directory)


@contextmanager
def refusals_of_the_class(directory: Path) -> Iterator[None]:
    """Building or running the class of a checkpoint: what transformers raises becomes E448.

    A config.json can hold any value under any of the keys that only the class reads, and the kinds of
    what it then raises are not documented.

    Raises:
        CheckpointError: E448, with the class's own words.
    """
    try:
        yield
    except MilesError:
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            "E448",
            f"the Hugging Face class does not accept {directory}",
            why=f"transformers says: {said}",
            fix="correct the value in config.json, or download or copy the checkpoint again",
            path=str(directory),
        ) from error


def load_hugging_face(directory: Path, family: str, dtype: str) -> nn.Module:
    """The model of a Hugging Face checkpoint, for inference; no code of the directory is run.

    Raises:
        CheckpointError: E431, the class has other tensors than the checkpoint; E448, it cannot be built.
    """
    with refusals_of_the_class(directory):
        model, report = model_class(family).from_pretrained(
            str(directory),
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report
        )
    wrong = [
        f"{name} ({kind})"
        for kind, key in (("missing", "missing_keys"), ("not in the class", "unexpected_keys"))
        for name in sorted(report[key])
    ] + [f"{name} (another shape)" for name, *_ in sorted(report["mismatched_keys"])]
    if wrong:
        raise CheckpointError(
            "E431",
            f"{len(wrong)} tensors do not fit the class of {family}, first {wrong[0]}",
            why="the Hugging Face class would compute something else",
            fix="use a model shape that the family can express",
            tensors=wrong,
        )
    return model.eval()
