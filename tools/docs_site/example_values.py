"""Example values for the keys of run files: from a file of chosen ones, from examples/ and from the documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from docs_site import schema_tree as tree
from hyper_parallel.config import yaml12
from hyper_parallel.config.generate import GenerateConfig
from hyper_parallel.config.rl import RLConfig
from hyper_parallel.config.run import RunConfig
from hyper_parallel.config.schema import json_schema
from hyper_parallel.errors import ConfigError

KINDS: dict[str, type[BaseModel]] = {"run": RunConfig, "rl": RLConfig, "generation": GenerateConfig}
"""The kinds of files that have a page."""
CHOSEN = Path(__file__).with_name("examples.yaml")
_MARKS = {"rl": {"roles", "rl", "task"}, "generation": {"inference", "workload"}}
"""Sections by which a file of a kind is known, beside having no other keys than this kind."""
LONGEST = 72
"""Characters of the longest example that a page shows."""
_BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.M | re.S)


def flow(value: Any) -> str:
    """A value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass(frozen=True, kw_only=True)
class Examples:
    """For each definition (the kind, for a file's own keys) and key: values that files have, best first."""

    found: dict[tuple[str, str], list[Any]]

    @classmethod
    def of(cls, root: Path) -> Examples:
        """Collects the values of a repository's examples and documents."""
        found: dict[tuple[str, str], list[Any]] = {}
        for kind, model in KINDS.items():
            schema = json_schema(model)
            for content in _contents(root, kind, set(schema["properties"])):
                for name, key, value in tree.values(schema, content, schema):
                    found.setdefault((name or kind, key), []).append(value)
        return cls(found=found)

    def best(self, kind: str, name: str, key: str, field: dict[str, Any]) -> Any:
        """The value to show for a key: the first short one that is not the default, else one that the schema gives.

        Returns None where there is no example.
        """
        default = field.get("default")
        homes = dict.fromkeys(
            (name or kind, name.removeprefix("Generation") or kind)
        )  # generation's are like training's
        values = [*(value for home in homes for value in self.found.get((home, key), ())), *_of_schema(field)]
        short = [value for value in values if value is not None and len(flow(value)) <= LONGEST]
        return next((value for value in short if value != default), short[0] if short else default)


def _of_schema(field: dict[str, Any]) -> Iterator[Any]:
    yield from field.get("examples", ())
    if field.get("type") == "boolean":
        yield not field.get("default", False)
    for more, one in tree.branches(field):
        if more:
            continue
        yield from one.get("enum", ())
        if "const" in one:
            yield one["const"]


def _contents(root: Path, kind: str, keys: set[str]) -> Iterator[Any]:
    """What the chosen file, the examples and the documents' YAML blocks of one kind hold."""
    yield from (yaml.safe_load(CHOSEN.read_text(encoding="utf-8")) or {}).get(kind, [])
    texts = [file.read_text(encoding="utf-8") for file in sorted((root / "examples").rglob("*.yaml"))]
    for page in sorted((root / "docs").rglob("*.md")):
        texts += _BLOCK.findall(page.read_text(encoding="utf-8"))
    for content in map(_parsed, texts):
        if content.keys() <= keys and (content.keys() & _MARKS.get(kind, content.keys())):
            yield content


def _parsed(text: str) -> dict[str, Any]:
    try:
        content = yaml12.parse(text, "example")
    except ConfigError:
        return {}
    return content if isinstance(content, dict) else {}
