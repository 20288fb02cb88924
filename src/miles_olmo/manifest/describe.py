"""The manifest's keys as documentation: type, range, default and the text under each field.

The code is the only source, so that the reference cannot say anything else than what is read.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from miles_olmo.manifest.base import Section
from miles_olmo.manifest.fields import dotted, section_at, subsection, walk_sections

_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean"}
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


@dataclass(frozen=True, slots=True)
class FieldDoc:
    """One key."""

    name: str
    type: str
    """For people, e.g. "integer >= 1"."""
    default: str
    """As TOML in backticks; "required" without one, "none" for an optional key."""
    text: str
    """What it means."""


@dataclass(frozen=True, slots=True)
class SectionDoc:
    """One table."""

    table: str
    """Dotted path; "" for the top level."""
    text: str
    """What it is for."""
    is_optional: bool
    """May be left out, and then switches something off."""
    fields: tuple[FieldDoc, ...]
    """Its keys, in the order of the model; sections are documented by themselves."""


def describe_manifest() -> list[SectionDoc]:
    """Every section in the order of the models, the top level first."""
    return [
        SectionDoc(
            dotted(path),
            inspect.getdoc(section) or "",
            _is_optional(path),
            tuple(_describe_fields(section)),
        )
        for path, section in walk_sections()
    ]


def field_texts(section: type[Section]) -> dict[str, str]:
    """The docstring under each field of a section."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts: dict[str, str] = {}
    for statement, following in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            texts[statement.target.id] = " ".join(str(following.value.value).split())
    return texts


def _describe_fields(section: type[Section]) -> list[FieldDoc]:
    texts = field_texts(section)
    return [
        FieldDoc(name, _type_text(field), _default_text(field), texts.get(name, ""))
        for name, field in section.model_fields.items()
        if subsection(field.annotation) is None
    ]


def _is_optional(path: tuple[str, ...]) -> bool:
    if not path:
        return False
    parent = section_at(path[:-1])
    assert parent is not None
    return parent.model_fields[path[-1]].default is None


def _type_text(field: FieldInfo) -> str:
    return _annotation_text(field.annotation, list(field.metadata))


def _annotation_text(annotation: Any, metadata: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        found = [
            m for item in more for m in (item.metadata if isinstance(item, FieldInfo) else [item])
        ]
        return _annotation_text(inner, metadata + found)
    if origin is Literal:
        return " or ".join(_toml(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        (option,) = [item for item in get_args(annotation) if item is not type(None)]
        return _annotation_text(option, metadata)
    if origin is tuple:
        items = get_args(annotation)
        if items[-1] is Ellipsis:
            return f"list of {_annotation_text(items[0], [])}s"
        return f"list of {len(items)}: {_annotation_text(items[0], [])}"
    bounds = [
        f"{sign} {getattr(item, name):g}"
        for item in metadata
        for name, sign in _BOUNDS
        if getattr(item, name, None) is not None
    ]
    return " ".join([_NAMES[annotation], ", ".join(bounds)]).strip()


def _default_text(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return "none" if field.default is None else f"`{_toml(field.default)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value)
