"""The sections of a file as types: their kinds and mappings with free keys, the merging of files and overrides by kind,
and the JSON schema of a file for editors.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo

from hyper_parallel.config.run import RunConfig
from hyper_parallel.strategy.axes import AUTO, OPEN_NAMES
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


Path = tuple[str, ...]
Kinds = Mapping[Path, tuple[str, Any]]
"""For a section with several kinds (`train.optimizer`): the key that names the kind, and its default."""


def merge(base: Any, over: Any, kinds: Kinds, path: Path = ()) -> Any:
    """Merge `over` into `base`: mappings key by key; any other value replaces the base's.

    A section of another kind replaces the base's, because its keys mean something else. Keys keep the base's order,
    new ones follow; keys of the base that `over` repeats take `over`'s order, since the order of axes and of rules
    matters.
    """
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over
    if path in kinds:
        key, default = kinds[path]
        was = base.get(key, default)
        if over.get(key, was) != was:
            return over
    again = iter([key for key in over if key in base])
    order = [next(again) if key in over else key for key in base]
    order += [key for key in over if key not in base]
    return {
        key: merge(base[key], over[key], kinds, (*path, str(key)))
        if key in base and key in over
        else (over if key in over else base)[key]
        for key in order
    }


def nest(path: Path, value: Any) -> Any:
    """``{"a": {"b": value}}`` for the path ``("a", "b")``."""
    for key in reversed(path):
        value = {key: value}
    return value


def without(data: Any, path: Path) -> Any:
    """The data without the value at a path; the data itself if the path does not exist."""
    key, *rest = path
    if not isinstance(data, Mapping) or key not in data:
        return data
    if rest:
        return {k: without(v, tuple(rest)) if k == key else v for k, v in data.items()}
    return {k: v for k, v in data.items() if k != key}


def present(data: Any, path: tuple[str | int, ...]) -> int:
    """The number of leading elements of a path that exist in the data."""
    for depth, key in enumerate(path):
        if not _has(data, key):
            return depth
        data = data[key]
    return len(path)


def value_at(data: Any, path: tuple[str | int, ...]) -> Any:
    """The value at a path, or None where the path ends before it."""
    for key in path:
        if not _has(data, key):
            return None
        data = data[key]
    return data


def _has(data: Any, key: str | int) -> bool:
    if isinstance(data, Mapping):
        return key in data
    return isinstance(data, list) and isinstance(key, int) and key < len(data)


# `auto` axes in files that extend each other: an override replaces single axes; and `roles: auto`, which replaces the
# devices of roles and nothing else.

_ALL = dict.fromkeys(OPEN_NAMES, AUTO)
_ALL_ROLES = {"split": AUTO, "actor": {"devices": None}, "rollout": {"devices": None}}


def spelled_out(content: Any) -> Any:
    """A file's content with `strategy: auto`, and `axes: auto`, written as one `auto` for each axis, and `roles: auto`
    as a split over roles without devices."""
    if not isinstance(content, Mapping):
        return content
    found = dict(content)
    if found.get("roles") == AUTO:
        found["roles"] = _ALL_ROLES
    if found.get("strategy") == AUTO:
        found["strategy"] = {"axes": AUTO}
    if isinstance(found.get("strategy"), Mapping):
        found["strategy"] = spelled_out(found["strategy"])
    if found.get("axes") == AUTO:
        found["axes"] = _ALL
    return found


def one_tensor(data: Any) -> Any:
    """Merged data in which a degree of `tensor` replaces an open `tensor_x`, or the reverse."""
    if not isinstance(data, Mapping):
        return data
    found = dict(data)
    if isinstance(found.get("strategy"), Mapping):
        found["strategy"] = one_tensor(found["strategy"])
    axes = found.get("axes")
    if isinstance(axes, Mapping) and {"tensor", "tensor_x"} <= axes.keys():
        open_ = next((name for name in ("tensor_x", "tensor") if axes[name] == AUTO), None)
        found["axes"] = {name: degree for name, degree in axes.items() if name != open_}
    return found


_TITLES = {
    "GenerateConfig": "HyperParallel generation file",
    "RLConfig": "HyperParallel reinforcement learning file",
    "RunConfig": "HyperParallel run file",
    "Strategy": "HyperParallel Strategy file",
}


def json_schema(model: type[BaseModel] = RunConfig) -> dict[str, Any]:
    """The schema of a file: sections under every accepted name, `auto` where the planner can choose, and `extends`.

    A file with `extends` inherits keys, so keys are required only without it. Derived fields are left out.
    """
    body = model.model_json_schema()
    sections: dict[str, Any] = body.get("$defs", {})
    for section in (body, *sections.values()):
        properties = section.get("properties", {})
        for key in [key for key, field in properties.items() if field.get("readOnly")]:
            del properties[key]
    for section in sections_of(model):
        _add_other_names(section, sections.get(section.__name__, body).get("properties", {}))
    for section in (body, *sections.values()):
        for key in ("strategy", "axes"):
            field = section.get("properties", {}).get(key)
            if field is not None and "$ref" in field and model.__name__ in ("RunConfig", "Strategy"):
                field["anyOf"] = [{"$ref": field.pop("$ref")}, {"const": AUTO}]
    if "$ref" in body["properties"].get("roles", {}):
        roles = body["properties"]["roles"]
        roles["anyOf"] = [{"$ref": roles.pop("$ref")}, {"const": AUTO}]
    properties = {
        "extends": {
            "type": "string",
            "title": "Extends",
            "description": "A base file, relative to this one, that this file extends.",
        },
        **body["properties"],
    }
    if "version" not in body.get("required", []):  # a Strategy within a run file may leave it out, a file not
        body["required"] = ["version", *body.get("required", [])]
    whole: dict[str, Any] = {"required": body.pop("required"), "properties": {}}
    for key, field in properties.items():
        name = field.get("$ref", "").rpartition("/")[2]
        if name and "required" in sections[name]:
            whole["properties"][key] = {"required": sections[name].pop("required")}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": _TITLES[model.__name__],
        "description": body["description"],
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "if": {"not": {"required": ["extends"]}},
        "then": whole,
        "$defs": sections,
    }


def _add_other_names(section: type[BaseModel], properties: dict[str, Any]) -> None:
    """Adds a field's aliases, such as `tensor` for `tensor_x`, which pydantic's schema leaves out."""
    for name, field in section.model_fields.items():
        if isinstance(field.validation_alias, AliasChoices):
            for other in field.validation_alias.choices:
                if isinstance(other, str) and other not in properties:
                    properties[other] = {**properties[name], "title": other.title()}
