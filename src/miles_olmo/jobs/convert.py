"""The converting job: a checkpoint in one layout, written in the other, both sides' logits compared.

    python -m miles_olmo.jobs.convert SOURCE DESTINATION [--step N [--checkpoint PATH]] [--dtype DTYPE]

    SOURCE                                        DESTINATION
    Hugging Face directory                        converted checkpoint, for `model.checkpoint`
    converted checkpoint                          Hugging Face directory
    run, or a checkpoint inside one               Hugging Face directory

The destination appears when the check has passed, or not at all. The last line of standard output is
one JSON object: the result, or the error.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from miles_olmo.api.converting import SCHEMA, refuse_existing
from miles_olmo.base.canonical import file_sha256
from miles_olmo.base.codes.entry import EXIT_BUG
from miles_olmo.base.errors import CheckpointError, MilesError, UsageError
from miles_olmo.base.lifeline import hold_lifeline
from miles_olmo.base.rundir import RunDirectory, run_of_checkpoint
from miles_olmo.jobs.inputs import checked_plan_input
from miles_olmo.manifest.hugging_face import CONFIG
from miles_olmo.manifest.models import Model
from miles_olmo.plan.imported_model import read_model
from miles_olmo.plan.read import read_plan
from miles_olmo.plan.sizes import num_parameters
from miles_olmo.policy.adapter import adapter_for
from miles_olmo.policy.atomic_directory import atomic_directory
from miles_olmo.policy.checkpoint import load_weights, newest_complete, visible_checkpoints
from miles_olmo.policy.export import check_logits
from miles_olmo.policy.export_tokenizer import (
    CopiedTokenizer,
    ExportTokenizer,
    SpecialTokenIds,
    check_copied_tokenizer,
)
from miles_olmo.policy.hugging_face_weights import read_hugging_face_weights
from miles_olmo.policy.initial_weights import cast_like, load_named
from miles_olmo.policy.weights_checkpoint import (
    complete_weights_checkpoint,
    is_weights_checkpoint,
    open_weights_checkpoint,
    read_weights,
    write_weights_checkpoint,
)

_CPU = torch.device("cpu")


def convert(
    source: Path,
    destination: Path,
    *,
    step: int | None = None,
    checkpoint: Path | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Convert `source` into `destination`.

    Args:
        step: Which checkpoint of a run; the newest complete one when None.
        checkpoint: Where the files of that checkpoint are held; in the run itself when None.
        dtype: Of the converted weights; only for a Hugging Face source.

    Returns:
        The receipt: direction, source, destination and the logits check.

    Raises:
        UsageError: E443 the destination exists, E444 the source is none of the three, E446 the run has
            no such checkpoint.
        CheckpointError: E17x the model is not supported, E440 and E441 unreadable or other weights,
            E433 the tokenizer does not fit, E442 or E430 other logits, E445 or E432 the files could not
            be written.
    """
    refuse_existing(destination)
    if (source / CONFIG).is_file():
        return _to_core(source, destination, dtype)
    if dtype is not None:
        raise _unconvertible(source, "a dtype can be chosen only for Hugging Face weights")
    if is_weights_checkpoint(source):
        return _converted_to_hugging_face(source, destination)
    return _run_to_hugging_face(source, destination, step, checkpoint)


def _to_core(source: Path, destination: Path, dtype: str | None) -> dict[str, Any]:
    """A Hugging Face directory becomes a converted checkpoint, which is read back for the check."""
    model = read_model(source, dtype=dtype)
    tokenizer = CopiedTokenizer(source, _token_ids(source))
    check_copied_tokenizer(tokenizer, vocab_size=model.shape.vocab_size)
    adapter = adapter_for(model.family)
    weights = read_hugging_face_weights(source)
    _check_size(source, model, weights)
    module = adapter.build(model, None, device=_CPU, seed=0)
    load_named(source, cast_like(weights, module), module, adapter)
    del weights
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(destination) as writing:
            tensors = dict(adapter.publication_tensors(module))
            write_weights_checkpoint(writing, tensors, model, tokenizer)
            load_named(writing, read_weights(writing), module, adapter)
            read_back = dict(adapter.publication_tensors(module))
            # In float32, which holds every weight: what is compared is the model, not its rounding.
            check = check_logits(
                source,
                model,
                partial(adapter.logits, adapter.float32_twin(module, model, read_back)),
                dtype="float32",
                rounded_to=model.dtype,
                code="E442",
            )
            receipt = {
                "schema": SCHEMA,
                "direction": "to-core",
                "source": str(source.resolve()),
                "source_config_sha256": file_sha256(source / CONFIG),
                "family": model.family,
                "dtype": model.dtype,
                "logits_check": asdict(check),
            }
            complete_weights_checkpoint(writing, receipt)
    except OSError as error:
        raise _unwritable(destination, error) from error
    return {**receipt, "destination": str(destination.resolve())}


def _converted_to_hugging_face(source: Path, destination: Path) -> dict[str, Any]:
    checkpoint = open_weights_checkpoint(source)
    model = checkpoint.model
    adapter = adapter_for(model.family)
    module = adapter.build(model, None, device=_CPU, seed=0)
    load_named(source, read_weights(source), module, adapter)
    _make_parent(destination)
    report = adapter.export(
        module, model, checkpoint.tokenizer, destination, plan_digest=None, step=None
    )
    return _exported(source, destination, report)


def _run_to_hugging_face(
    source: Path, destination: Path, step: int | None, held: Path | None
) -> dict[str, Any]:
    if held is None or step is None:
        run, checkpoint = _checkpoint_of_run(source, step)
    else:
        run = RunDirectory(source.resolve())
        checkpoint = run.checkpoint(step)
    plan = read_plan(run.plan)
    model, data = plan.manifest.model, plan.manifest.data
    adapter = adapter_for(model.family)
    module = adapter.build(model, None, device=_CPU, seed=0)
    load_weights(held or checkpoint, module, adapter)
    tokenizer = ExportTokenizer(
        checked_plan_input(plan, run, "data.tokenizer"), data.eos_token, data.bos_token
    )
    _make_parent(destination)
    report = adapter.export(
        module,
        model,
        tokenizer,
        destination,
        plan_digest=plan.digest,
        step=int(checkpoint.name.removeprefix("step-")),
    )
    return _exported(checkpoint, destination, report)


def _exported(source: Path, destination: Path, report: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "direction": "to-hugging-face",
        "source": str(source.resolve()),
        "destination": str(destination.resolve()),
        **{key: report[key] for key in ("family", "dtype", "step", "logits_check")},
    }


def _checkpoint_of_run(source: Path, step: int | None) -> tuple[RunDirectory, Path]:
    """The run and its checkpoint, from either's directory."""
    inside = run_of_checkpoint(source)
    if step is None and inside is not None:
        return inside, source.resolve()
    run = RunDirectory(source.resolve())
    if not run.plan.is_file():
        raise _unconvertible(source, f"it has no {CONFIG}, and no run's plan.json belongs to it")
    if step is not None:
        path = run.checkpoint(step)
        found = path if path.is_dir() else None
    else:
        found = newest_complete(run.checkpoints).path
    if found is None:
        steps = ", ".join(map(str, sorted(visible_checkpoints(run.checkpoints)))) or "none"
        raise UsageError(
            "E446",
            f"run {run.run_id} has no {'complete checkpoint' if step is None else f'step {step}'}",
            why=f"its checkpoints are of the steps: {steps}",
            fix="name one of these with --step",
        )
    return run, found


def _check_size(source: Path, model: Model, weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse a description of a far larger model before memory is taken for it.

    What differs by less is named tensor by tensor when the weights are loaded.
    """
    described = num_parameters(model.shape)
    held = sum(tensor.numel() for tensor in weights.values())
    if described > 2 * held:
        raise CheckpointError(
            "E441",
            f"the weights of {source} do not fit the policy: they hold {held:,} values, and "
            f"{CONFIG} describes {described:,}",
            why="the model that is described beside them is another one",
            fix="use the config.json that the weights were saved with",
        )


def _token_ids(source: Path) -> SpecialTokenIds:
    config = json.loads((source / CONFIG).read_text())
    return SpecialTokenIds(*(config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")))


def _make_parent(destination: Path) -> None:
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(destination, error) from error


def _unwritable(destination: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        "E445",
        f"{destination} could not be written: {error.strerror or error}",
        why="a converted checkpoint needs room for one copy of the weights",
        fix="free disk space or choose another directory",
        path=str(destination),
    )


def _unconvertible(source: Path, why: str) -> UsageError:
    return UsageError(
        "E444",
        f"{source} cannot be converted",
        why=why,
        fix="name a Hugging Face directory, a converted checkpoint, a run, or a checkpoint in one",
    )


def main(argv: list[str] | None = None) -> int:
    """Convert; print the result or the error as the last line of standard output."""
    parser = argparse.ArgumentParser(prog="python -m miles_olmo.jobs.convert")
    parser.add_argument("source", type=Path)
    parser.add_argument("destination", type=Path)
    parser.add_argument("--step", type=int, help="checkpoint of a run")
    parser.add_argument("--checkpoint", type=Path, help="where its files are held")
    parser.add_argument("--dtype", help="of the converted weights")
    arguments = parser.parse_args(argv)
    hold_lifeline()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        result = convert(
            arguments.source,
            arguments.destination,
            step=arguments.step,
            checkpoint=arguments.checkpoint,
            dtype=arguments.dtype,
        )
    except MilesError as error:
        print(json.dumps({"schema": SCHEMA, "error": error.as_json()}), flush=True)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return EXIT_BUG
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
