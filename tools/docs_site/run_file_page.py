"""The pages of run files: every key with its type, default, meaning and an example, from the JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from docs_site import schema_tree as tree
from docs_site.example_values import KINDS, Examples, flow
from hyper_parallel.config.schema import json_schema, sections_of

_TITLES = {"run": "Run file", "rl": "Reinforcement learning file", "generation": "Generation file"}
_OPTIONS = {"run": "", "rl": " --rl", "generation": " --generate"}
_READERS = {
    "run": "`hyper-parallel train`, `verify`, `inspect`, `simulate` and `plan` read",
    "rl": "`hyper-parallel rl` reads",
    "generation": "`hyper-parallel generate --config` and `simulate --generate` read",
}


def page(kind: str, examples: Examples) -> str:
    """Markdown with a section for each section of the file, and a heading for each key.

    Sections that the run file's page has are links to it on the page of another kind.
    """
    schema = with_made_defaults(kind)
    other = {one.name: one for one in tree.sections(with_made_defaults("run"))} if kind != "run" else {}
    found = tree.sections(schema)
    homes = {one.name: f"#{anchor(one)}" for one in found}
    for name, one in other.items():
        if name and name in homes and one.body == schema["$defs"][name]:
            homes[name] = f"run-file.md#{anchor(one)}"
    lines = [
        f"# {_TITLES[kind]}",
        "",
        f"{_READERS[kind]} this file. This page is made from the schema that",
        f"`hyper-parallel schema{_OPTIONS[kind]}` prints, with which an editor completes and checks the file.",
        "On the command line each key is a dotted override, such as `train.steps=20`.",
        "",
    ]
    for section in found:
        if homes[section.name].startswith("#"):
            lines += _section(schema, section, kind, homes, examples)
    return "\n".join(lines)


def with_made_defaults(kind: str) -> dict[str, Any]:
    """The schema with the defaults that a function makes (lists and mappings), which pydantic's schema leaves out."""
    schema = json_schema(KINDS[kind])
    classes = {one.__name__: one for one in sections_of(KINDS[kind])}
    for name, body in {**schema["$defs"], KINDS[kind].__name__: schema}.items():
        for key, field in body.get("properties", {}).items():
            made = classes[name].model_fields.get(key) if name in classes else None
            if made is not None and made.default_factory is not None and "default" not in field:
                default = made.get_default(call_default_factory=True, validated_data={})
                field["default"] = list(default) if isinstance(default, tuple) else default
    return schema


def anchor(section: tree.Section) -> str:
    """The id of a section's heading: the first path that leads to it, and a suffix, since a key has the path as id."""
    path = section.paths[0] or "file"
    return f"{path}-{section.body['properties']['name']['const'] if _named(section) else 'keys'}"


def _named(section: tree.Section) -> bool:
    """Whether a section is one of several that a key `name` chooses."""
    return "const" in section.keys.get("name", {})


def _section(
    schema: dict[str, Any], section: tree.Section, kind: str, homes: dict[str, str], examples: Examples
) -> Iterator[str]:
    if section.name:
        chosen = f" with `name: {section.keys['name']['const']}`" if _named(section) else ""
        yield f"## `{section.paths[0]}`{chosen} {{ #{anchor(section)} }}"
        yield ""
        if section.body.get("description"):
            yield prose(section.body["description"])
        if len(section.paths) > 1:
            yield "\nAlso at " + ", ".join(f"`{path}`" for path in dict.fromkeys(section.paths[1:])) + "."
    else:
        yield f"## Keys of the file {{ #{anchor(section)} }}"
    yield ""
    must = tree.required(schema, section)
    start = f"{anchor(section) if _named(section) else section.paths[0]}." if section.name else ""
    for key, field in section.keys.items():
        yield f"### `{f'{section.paths[0]}.' if section.name else ''}{key}` {{ #{start}{key} }}"
        yield ""
        yield " · ".join(
            _facts(key, field, key in must, homes, examples.best(kind, section.name, key, field))
        )
        yield ""
        yield prose(meaning(schema, section, key))
        yield ""


def meaning(schema: dict[str, Any], section: tree.Section, key: str) -> str:
    """A key's description, else that of the section that it holds; for `name`, the choice that it makes."""
    field = section.keys[key]
    if field.get("description"):
        return str(field["description"])
    if key == "name" and _named(section):
        return "Selects this section's kind."
    for _, one in tree.branches(field):
        if tree.reference(one):
            return str(schema["$defs"][tree.reference(one)].get("description", ""))
    return ""


def _facts(key: str, field: dict[str, Any], must: bool, homes: dict[str, str], example: Any) -> Iterator[str]:
    yield kind_of(field, homes)
    default = field.get("default")
    if must:
        yield "**required**"
    elif default is not None and not (isinstance(default, dict) and default):
        yield f"default `{flow(default)}`"
    elif default is None and "default" in field:
        yield "default: none"
    if example is not None and not isinstance(example, dict):
        yield f"example `{key}: {flow(example)}`"
    elif example:
        shown = {name: value for name, value in example.items() if value is not None}
        text = flow(shown)
        yield f"example `{key}: {text if len(text) <= 100 else text[: text.rfind(', ', 0, 96)] + ', …}'}`"


def kind_of(field: dict[str, Any], homes: dict[str, str]) -> str:
    """A field's type in words: a section is a link, choices are listed, numbers have their bounds."""
    several = field.get("anyOf") or field.get("oneOf")
    if several:
        words = [kind_of(one, homes) for one in several if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(words))
    name = tree.reference(field)
    if name:
        return f"[section]({homes[name]})"
    if "enum" in field:
        return " or ".join(f"`{flow(one)}`" for one in field["enum"])
    if "const" in field:
        return f"`{flow(field['const'])}`"
    types = field.get("type", "any value")
    if isinstance(types, list):
        return " or ".join(_plain({**field, "type": one}, homes) for one in types)
    return _plain(field, homes)


def _plain(field: dict[str, Any], homes: dict[str, str]) -> str:
    kind = field.get("type", "any value")
    if kind == "array":
        if "prefixItems" in field:
            return "list of " + ", ".join(kind_of(one, homes) for one in field["prefixItems"])
        return f"list of {kind_of(field.get('items', {}), homes)}"
    if kind == "object":
        inner = field.get("additionalProperties")
        return f"mapping of names to {kind_of(inner, homes)}" if isinstance(inner, dict) else "mapping"
    if kind in ("integer", "number"):
        return kind + _bounds(field)
    return {"boolean": "`true` or `false`", "string": "text"}.get(kind, kind)


def _bounds(field: dict[str, Any]) -> str:
    names = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    words = [f"{word} {field[name]:g}" for name, word in names.items() if name in field]
    return f" ({', '.join(words)})" if words else ""


def prose(text: str) -> str:
    """A docstring as Markdown: double backquotes are single ones, and names of documents are links."""
    text = text.replace("``", "`")
    return re.sub(r"(?<![\w/`])(?<!\]\()docs/([\w-]+\.md)", r"[\1](../\1)", text)
