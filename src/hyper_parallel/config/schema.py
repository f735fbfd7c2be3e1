"""Type introspection of the sections: their kinds, and the mappings with free keys."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hyper_parallel.config.merge import Kinds, Path
from hyper_parallel.strategy.section import keys_of


def kinds(model: type[BaseModel], path: Path = ()) -> Kinds:
    """Every section under `model` with several kinds, with the key that names the kind and its default.

    A Transformers config counts as one: the fields of another `model_type` mean something else.
    """
    found: dict[Path, tuple[str, Any]] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.discriminator, str):
            key = field.discriminator
            found[*path, name] = (key, getattr(field.default, key, None))
        elif name == "config" and _free(field.annotation):
            found[*path, name] = ("model_type", None)
        for section in _sections(field.annotation):
            found.update(kinds(section, (*path, name)))
    return found


def sections_of(model: type[BaseModel]) -> set[type[BaseModel]]:
    """`model` and every section under it."""
    found, queue = set[type[BaseModel]](), [model]
    while queue:
        section = queue.pop()
        if section not in found:
            found.add(section)
            queue += [
                inner for field in section.model_fields.values() for inner in _sections(field.annotation)
            ]
    return found


def split(model: type[BaseModel], key: str) -> Path:
    """The path that a dotted key names.

    Where a mapping's keys are patterns of module names (`strategy.rules`, `strategy.precision.modules`), the
    rest of the key is one pattern, dots included. In a mapping that holds anything (`model.config`) every dot
    goes one level down.
    """
    parts = key.split(".")
    options: list[Any] = [model]
    for depth, part in enumerate(parts[:-1]):
        fields = [section.model_fields[part] for section in options if part in section.model_fields]
        if any(_holds_names(field.annotation) for field in fields):
            return (*parts[: depth + 1], ".".join(parts[depth + 1 :]))
        options = [section for field in fields for section in _sections(field.annotation)]
    return tuple(parts)


def field_at(model: type[BaseModel], path: tuple[str | int, ...]) -> FieldInfo | None:
    """The field that a path names, or None where there is none (a free key, an element of a list)."""
    options: list[type[BaseModel]] = [model]
    field: FieldInfo | None = None
    for part in path:
        field = next(
            (
                found
                for s in options
                for name, found in s.model_fields.items()
                if part in keys_of(name, found)
            ),
            None,
        )
        if field is None:
            return None
        options = list(_sections(field.annotation))
    return field


def sections_at(field: FieldInfo) -> list[type[BaseModel]]:
    """The sections that a field may hold."""
    return list(_sections(field.annotation))


def _members(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type, its metadata taken off."""
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            yield member


def _free(annotation: Any) -> bool:
    return any(get_origin(m) is dict and get_args(m)[1] is Any for m in _members(annotation))


def _holds_names(annotation: Any) -> bool:
    return any(get_origin(m) is dict and get_args(m)[1] is not Any for m in _members(annotation))
