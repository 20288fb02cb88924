"""The manifest's keys as a tree: which section a path leads to, and what it may hold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from miles_olmo.manifest.base import Section
from miles_olmo.manifest.models import Manifest
from miles_olmo.manifest.positions import KeyPath


def dotted(path: KeyPath) -> str:
    """`train.optimizer.betas[1]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def table_name(path: KeyPath) -> str:
    """How a person calls a table: `[train.optimizer]`, or the manifest itself."""
    return f"[{dotted(path)}]" if path else "the top level"


def subsection(annotation: Any) -> type[Section] | None:
    """The section inside a field's annotation (`X` or `X | None`), if it is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, UnionType):
        for option in get_args(annotation):
            if (section := subsection(option)) is not None:
                return section
    return None


def section_at(path: KeyPath) -> type[Section] | None:
    """The section that a path leads to, or None when it leads elsewhere."""
    section: type[Section] | None = Manifest
    for part in path:
        if section is None or not isinstance(part, str) or part not in section.model_fields:
            return None
        section = subsection(section.model_fields[part].annotation)
    return section


def choices(path: KeyPath) -> tuple[Any, ...]:
    """The values that a Literal field accepts; empty for other fields."""
    section = section_at(path[:-1])
    field = section.model_fields.get(str(path[-1])) if section and path else None
    return _literal_values(field.annotation) if field else ()


def _literal_values(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return tuple(value for option in get_args(annotation) for value in _literal_values(option))
    return ()


def walk_sections(
    section: type[Section] = Manifest, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[Section]]]:
    """Every section with its path, in the order of the models; the manifest itself first."""
    yield path, section
    for name, field in section.model_fields.items():
        inner = subsection(field.annotation)
        if inner is not None:
            yield from walk_sections(inner, (*path, name))


@cache
def all_keys() -> frozenset[tuple[str, ...]]:
    """The path of every key that is not itself a section."""
    return frozenset(
        (*path, name)
        for path, section in walk_sections()
        for name, field in section.model_fields.items()
        if subsection(field.annotation) is None
    )


def sections_with_key(name: str) -> list[tuple[str, ...]]:
    """Paths of the sections that have a key of this name."""
    return [path for path, section in walk_sections() if name in section.model_fields]
