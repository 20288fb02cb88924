"""`[model]` from the checkpoint it starts from: what the file says is filled in, what contradicts is refused.

A Hugging Face directory says everything in its `config.json`; a converted checkpoint in its `model.json`; a
checkpoint of a run in the run's `plan.json`, two directories up. They are read when a manifest is read, before its types are checked, so that the plan holds a whole
`[model]` and nothing later has to know where it came from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_olmo.base.errors import CheckpointError
from miles_olmo.base.problems import Problem
from miles_olmo.base.rundir import RunDirectory, run_of_checkpoint
from miles_olmo.base.suggest import closest
from miles_olmo.manifest.hugging_face import CONFIG, DTYPES, FAMILIES, read_hugging_face
from miles_olmo.manifest.models import Model
from miles_olmo.manifest.positions import Positions
from miles_olmo.plan.checks.finding import Finding, locate
from miles_olmo.plan.checks.model import MODEL_CHECKS

MODEL_FILE = "model.json"
"""In a converted checkpoint: its [model] table."""

Document = dict[str, Any]


def fill_model(document: Document, positions: Positions, base: Path) -> list[Problem]:
    """Complete `[model]` of a parsed manifest from `model.checkpoint`, in place.

    Does nothing for a run's checkpoint that was copied away from its run, which does not say what its
    model is, or where there is no checkpoint: these are other checks' concern.

    Args:
        document: The parsed manifest; its types have not been checked yet.
        positions: Where its keys stand.
        base: Directory that the checkpoint is relative to.

    Returns:
        What is wrong: E170 another architecture, E171 a feature that is not supported, E172 a key of
        [model] that says something else, E173 a file that cannot be read.
    """
    table = document.get("model")
    written = table.get("checkpoint") if isinstance(table, dict) else None
    if not isinstance(table, dict) or not isinstance(written, str):
        return []
    path = base / written
    for name, read in ((CONFIG, _hugging_face), (MODEL_FILE, _converted)):
        if (path / name).is_file():
            return [locate(found, positions) for found in read(table, path / name, written)]
    run = run_of_checkpoint(path)
    return [] if run is None else [locate(f, positions) for f in _of_a_run(table, run)]


def read_model(path: Path, *, dtype: str | None = None) -> Model:
    """The model of a checkpoint that describes itself, without a manifest.

    Args:
        path: A Hugging Face directory or a converted checkpoint.
        dtype: Instead of the dtype of the files.

    Raises:
        CheckpointError: E170-E173 as `fill_model`, or E101-E103 and E175-E177: the model cannot be
            built.
    """
    table: Document = {"checkpoint": str(path)} | ({"dtype": dtype} if dtype else {})
    problems = fill_model({"model": table}, Positions(str(path), {}), Path())
    if not problems:
        del table["checkpoint"]
        try:
            model = Model.model_validate(table)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise CheckpointError(
                "E173",
                f"the description of the model beside {path} cannot be read",
                why=f"{place}: {first['msg']}",
                fix="restore the file",
            ) from error
        problems = [found for check in MODEL_CHECKS for found in check(model)]
        if not problems:
            return model
    first = problems[0]
    raise CheckpointError(first.code, first.what, why=first.why, fix=first.fix)


class _Fault(Exception):
    """A file that says nothing usable."""


def _hugging_face(table: Document, file: Path, written: str) -> Iterator[Finding]:
    key = ("model.checkpoint",)
    shown = f"{written}/{CONFIG}"
    try:
        config = _read_object(file)
        imported = read_hugging_face(config)
    except (_Fault, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        why = f"{error}" if isinstance(error, _Fault) else f"a value has a wrong type: {error!r}"
        yield Finding("E173", key, f"{shown} cannot be read", why, "restore the file")
        return
    if imported is None:
        yield _unknown_architecture(key, shown, config)
        return
    architectures = config.get("architectures") or [imported.family.architecture]
    if not isinstance(architectures, list):
        why = f"architectures is {architectures!r}, not a list of names"
        yield Finding("E173", key, f"{shown} cannot be read", why, "restore the file")
        return
    if imported.family.architecture not in architectures:
        what = f"{shown} has architectures = {architectures!r}"
        why = f"only {imported.family.architecture} of this model_type is trained"
        yield Finding("E170", key, what, why, "name a checkpoint of a causal language model")
    for feature in imported.unsupported:
        what, why = f"{shown} has {feature}", "the trainer's block does not compute it"
        yield Finding("E171", key, what, why, "name a checkpoint without it")
    if imported.unsupported:
        return
    if "dtype" not in table and imported.dtype not in (*DTYPES, None):
        what, why = f"{shown} has dtype = {imported.dtype!r}", f"weights are {' or '.join(DTYPES)}"
        yield Finding("E172", key, what, why, "set model.dtype; the weights are cast to it")
    dtype = imported.dtype if imported.dtype in DTYPES else None
    yield from _merge(
        table, imported.family.family, dtype, imported.shape, imported.family.keys, shown
    )


def _unknown_architecture(key: tuple[str, ...], shown: str, config: Mapping[str, Any]) -> Finding:
    kind = config.get("model_type")
    near = closest(str(kind), FAMILIES)
    known = ", ".join(FAMILIES)
    fix = f"did you mean '{near}'?" if near else "name a checkpoint of one of these"
    what, why = f"{shown} has model_type = {kind!r}", f"the families are {known}"
    return Finding("E170", key, what, why, fix)


def _converted(table: Document, file: Path, written: str) -> Iterator[Finding]:
    shown = f"{written}/{MODEL_FILE}"
    yield from _recorded(table, file, ("model",), shown, "convert the checkpoint again")


def _of_a_run(table: Document, run: RunDirectory) -> Iterator[Finding]:
    """A checkpoint of a run has the model of the run's plan."""
    shown = f"{run.run_id}/{run.plan.name}"
    model = ("content", "manifest", "model")
    yield from _recorded(table, run.plan, model, shown, "restore the file")


def _recorded(
    table: Document, file: Path, place: tuple[str, ...], shown: str, repair: str
) -> Iterator[Finding]:
    """From a whole [model] table that this project wrote, at `place` in a JSON file."""
    try:
        model: Any = _read_object(file)
        for name in place:
            model = model[name]
        family, dtype, shape = model["family"], model["dtype"], dict(model["shape"])
        _ = shape["num_layers"]
    except (_Fault, TypeError, ValueError, KeyError) as error:
        why = f"{error}" if isinstance(error, _Fault) else f"it has no {'.'.join(place)} table"
        yield Finding("E173", ("model.checkpoint",), f"{shown} cannot be read", why, repair)
        return
    yield from _merge(table, family, dtype, shape, {}, shown)
    if "dtype" in table and table["dtype"] != dtype:
        what = f"dtype = '{table['dtype']}' in [model], '{dtype}' in {shown}"
        why = "a checkpoint of this project is loaded without a cast"
        fix = f"set dtype = '{dtype}', or convert its Hugging Face export with --dtype"
        yield Finding("E172", ("model.dtype",), what, why, fix)


def _merge(
    table: Document,
    family: str,
    dtype: str | None,
    shape: Mapping[str, Any],
    names: Mapping[str, str],
    shown: str,
) -> Iterator[Finding]:
    """Fill what is not written; report what is written differently."""
    if table.setdefault("family", family) != family:
        what = f"family = '{table['family']}' in [model], '{family}' in {shown}"
        fix = f"set family = '{family}' or remove it"
        yield Finding("E172", ("model.family",), what, "the weights are of that family", fix)
        return
    if dtype is not None:
        table.setdefault("dtype", dtype)
    own = table.setdefault("shape", {})
    if not isinstance(own, dict):
        return
    num_layers = shape["num_layers"]
    for name, value in shape.items():
        if name not in own:
            if value is not None:  # TOML and JSON's null both mean absent here
                own[name] = value
        elif not _same(name, own[name], value, num_layers):
            what = (
                f"{name} = {_shown(own[name])} in [model.shape], "
                f"{names.get(name, name)} = {_shown(value)} in {shown}"
            )
            fix = f"set {name} = {_shown(value)} or remove it: it is filled in from the checkpoint"
            yield Finding(
                "E172", (f"model.shape.{name}",), what, "the weights have that shape", fix
            )


def _same(name: str, own: Any, value: Any, num_layers: int) -> bool:
    if name == "layer_types" and isinstance(own, list) and own:
        full = value or ["full_attention"]
        return all(own[i % len(own)] == full[i % len(full)] for i in range(num_layers))
    if name == "dense_layers_indices" and isinstance(own, list):
        return own == list(value)
    return own == value and isinstance(own, bool) == isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _Fault(error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _Fault(f"it is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise _Fault("it is not a JSON object")
    return content
