"""The sections and keys of a JSON schema of run files, in the order in which a file has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ANY = "NAME"
"""Stands in a path for a key that the user chooses, such as the name of a submodel."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """An object of the schema: its definition's name (empty for the file itself) and the paths that lead to it."""

    name: str
    paths: tuple[str, ...]
    body: dict[str, Any]

    @property
    def keys(self) -> dict[str, dict[str, Any]]:
        """The schema of each key."""
        return self.body.get("properties", {})


def branches(field: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The alternatives of a field, each behind the part of a path that leads to it (`.NAME` for a mapping's values)."""
    for one in field.get("anyOf") or field.get("oneOf") or [field]:
        values = one.get("additionalProperties")
        if isinstance(values, dict):
            yield from ((f".{ANY}{more}", inner) for more, inner in branches(values))
        yield "", one


def reference(field: dict[str, Any]) -> str:
    """The name of the definition that a field refers to; empty if it refers to none."""
    return str(field.get("$ref", "")).rpartition("/")[2]


def sections(schema: dict[str, Any]) -> list[Section]:
    """All sections that a file can have, each once, outer before inner and in the order of their keys."""
    paths: dict[str, list[str]] = {}

    def visit(body: dict[str, Any], path: str) -> None:
        for key, field in body.get("properties", {}).items():
            for more, one in branches(field):
                name = reference(one)
                if name:
                    paths.setdefault(name, []).append(f"{path}{key}{more}")
                    visit(schema["$defs"][name], f"{path}{key}{more}.")

    visit(schema, "")
    whole = Section(name="", paths=("",), body=schema)
    return [whole] + [
        Section(name=name, paths=tuple(found), body=schema["$defs"][name]) for name, found in paths.items()
    ]


def required(schema: dict[str, Any], section: Section) -> set[str]:
    """Keys that a file without `extends` must have in a section."""
    then = schema.get("then", {})
    if not section.name:
        return set(then.get("required", ()))
    moved = then.get("properties", {}).get(section.paths[0], {}).get("required", ())
    return {*section.body.get("required", ()), *moved}


def values(
    schema: dict[str, Any], content: Any, body: dict[str, Any], name: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Each value that a file has: the definition's name, the key, and the value."""
    for key, value in content.items() if isinstance(content, dict) else ():
        field = body.get("properties", {}).get(key)
        if field is None:
            continue
        yield name, key, value
        for more, one in branches(field):
            inner = reference(one)
            if not inner or not isinstance(value, dict):
                continue
            target = schema["$defs"][inner]
            wanted = target["properties"].get("name", {}).get("const")
            if (
                wanted is not None
                and value.get("name", target["properties"]["name"].get("default")) != wanted
            ):
                continue
            for part in value.values() if more else (value,):
                yield from values(schema, part, target, inner)
