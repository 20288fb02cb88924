"""From what pydantic says to what a person needs: place, key, value, reason, what to set."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

from miles_olmo.base.problems import Problem, ProblemReport
from miles_olmo.base.suggest import closest, did_you_mean
from miles_olmo.manifest.fields import (
    choices,
    dotted,
    section_at,
    sections_with_key,
    subsection,
    table_name,
)
from miles_olmo.manifest.positions import KeyPath, Positions
from miles_olmo.manifest.secrets import looks_secret

_EXPECTED_TYPES = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


class ManifestErrors(ProblemReport):
    """Everything that is wrong with a manifest, ordered by place."""


def sort_problems(problems: list[Problem], file: str) -> list[Problem]:
    """The manifest's own problems first, then those of other files; by place, each once."""
    unique = dict.fromkeys(problems)
    return sorted(unique, key=lambda p: (p.file != file, p.file, p.line, p.column, p.code, p.what))


def rename_misspelt_sections(
    document: dict[str, Any], positions: Positions
) -> tuple[list[Problem], Positions]:
    """Move tables whose name is a near miss to where they were meant to be, and report each.

    What is wrong inside of them is then found too.
    """
    problems: list[Problem] = []

    def visit(table: dict[str, Any], path: KeyPath) -> None:
        nonlocal positions
        section = section_at(path)
        if section is None:
            return
        sections = [n for n, f in section.model_fields.items() if subsection(f.annotation)]
        for name in list(table):
            if name in section.model_fields or not isinstance(table[name], dict):
                continue
            near = closest(name, [option for option in sections if option not in table])
            if near is None or looks_secret(name):
                continue
            place = positions.where((*path, name))
            clauses = _unknown_key((*path, name), is_table=True, meant=near)
            problems.append(Problem(place.file, place.line, place.column, *clauses))
            table[near] = table.pop(name)
            positions = positions.renamed((*path, name), (*path, near))
        for name in sections:
            if isinstance(table.get(name), dict):
                visit(table[name], (*path, name))

    visit(document, ())
    return problems, positions


def describe_errors(
    errors: list[Any], document: dict[str, Any], positions: Positions
) -> Iterator[Problem]:
    """One problem per pydantic error; a missing key that was misspelt is reported once."""
    misspelt = set(meant_keys(errors))
    for error in errors:
        path: KeyPath = error["loc"]
        if error["type"] == "missing" and path in misspelt:
            continue
        code, what, why, fix = _clauses(error, path, document)
        place = positions.where(path)
        yield Problem(place.file, place.line, place.column, code, what, why, fix)


def meant_keys(errors: list[Any]) -> list[KeyPath]:
    """The keys that misspelt ones were probably meant to be."""
    return [
        (*error["loc"][:-1], near)
        for error in errors
        if error["type"] == "extra_forbidden" and (near := _nearest_sibling(error["loc"]))
    ]


def _clauses(error: Any, path: KeyPath, document: dict[str, Any]) -> tuple[str, str, str, str]:
    kind = error["type"]
    if kind == "extra_forbidden":
        is_table = isinstance(_value_at(document, path), dict)
        return _unknown_key(path, is_table=is_table, meant=_nearest_sibling(path))
    if kind == "missing" and isinstance(path[-1], str):
        return _missing_key(path)
    value = _value_at(document, path)
    key = dotted(path)
    if kind == "literal_error":
        return _not_a_choice(path, value)
    if kind in _EXPECTED_TYPES:
        expected = _EXPECTED_TYPES[kind]
        return (
            "E005",
            f"{key} is {_shown(path, value)}",
            f"it must be {expected}",
            f"write {expected}",
        )
    return "E007", *_out_of_range(error, path, value)


def _unknown_key(path: KeyPath, *, is_table: bool, meant: str | None) -> tuple[str, str, str, str]:
    name, table = str(path[-1]), table_name(path[:-1])
    if looks_secret(name):
        return (
            "E008",
            f"key '{name}' looks like a secret",
            "a manifest is copied into plans and receipts, where secrets must not be",
            "remove it and pass the secret through the environment",
        )
    what = f"unknown section '{name}'" if is_table else f"unknown key '{name}'"
    why = f"{table} has no such key"
    if meant is not None:
        return "E003", what, why, f"set '{meant}'"
    homes = sections_with_key(name)
    if len(homes) == 1:
        return "E003", what, why, f"move it to {table_name(homes[0])}"
    return "E003", what, why, "remove it"


def _missing_key(path: KeyPath) -> tuple[str, str, str, str]:
    name, table = str(path[-1]), table_name(path[:-1])
    section = section_at(path[:-1])
    field = section.model_fields.get(name) if section else None
    if field is not None and subsection(field.annotation) is not None:
        return (
            "E004",
            f"missing section {table_name(path)}",
            "it has keys without a default",
            f"add {table_name(path)}",
        )
    return "E004", f"missing key '{name}' in {table}", "it has no default", f"add {name} = ..."


def _not_a_choice(path: KeyPath, value: Any) -> tuple[str, str, str, str]:
    options = choices(path)
    shown = ", ".join(_quoted(option) for option in options)
    what = f"{dotted(path)} is {_shown(path, value)}"
    near = isinstance(value, str) and closest(value, [o for o in options if isinstance(o, str)])
    if near:
        return "E006", what, f"it must be one of {shown}", did_you_mean(near, [near])
    if len(options) == 1:
        return "E006", what, f"only {shown} is known", f"set {shown}"
    return "E006", what, f"it must be one of {shown}", "choose one of them"


def _out_of_range(error: Any, path: KeyPath, value: Any) -> tuple[str, str, str]:
    context = error.get("ctx", {})
    limits = {
        "greater_than_equal": ("at least", "ge"),
        "greater_than": ("above", "gt"),
        "less_than_equal": ("at most", "le"),
        "less_than": ("below", "lt"),
    }
    what = f"{dotted(path)} is {_shown(path, value)}"
    kind = error["type"]
    if kind in limits:
        words, key = limits[kind]
        limit = f"{words} {context[key]:g}"
        of = "of " if words.startswith("at ") else ""
        return what, f"it must be {limit}", f"set a value {of}{limit}"
    if kind == "finite_number":
        return what, "it must be finite", "set an ordinary number"
    if kind == "string_pattern_mismatch":
        return (
            what,
            "it may hold only lower-case letters, digits and hyphens, starts with a letter or digit, "
            "and has at most 40 characters",
            "choose such a name",
        )
    if kind == "too_short" or kind == "missing":
        what = f"{dotted(path if kind == 'too_short' else path[:-1])} has too few values"
        return what, "every value is needed", "add the missing values"
    if kind == "too_long":
        return f"{dotted(path)} has too many values", error["msg"], "remove the others"
    return what, error["msg"], "correct the value"


def _nearest_sibling(path: KeyPath) -> str | None:
    section = section_at(path[:-1])
    return closest(str(path[-1]), section.model_fields) if section else None


def _value_at(document: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            document = document[part]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def _shown(path: KeyPath, value: Any) -> str:
    """A value with its type; containers, long texts and what may be secret are not shown whole."""
    if any(isinstance(part, str) and looks_secret(part) for part in path):
        return "a value that is not shown"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "the string " + _quoted(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, datetime.date | datetime.time):
        return "a date or time"
    if isinstance(value, int) and value.bit_length() > 128:
        return "a very large integer"
    return f"{value}"


def _quoted(value: Any) -> str:
    if not isinstance(value, str):
        return str(value)
    return f"'{value}'"
