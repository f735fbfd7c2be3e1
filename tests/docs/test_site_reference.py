"""The generated reference: every key of both schemas with a meaning and an example that the schema takes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from docs_site import commands_page, python_page, run_file_page
from docs_site import schema_tree as tree
from docs_site.example_values import CHOSEN, KINDS, Examples

import hyper_parallel
from hyper_parallel import checkpoint
from hyper_parallel.cli.main import command
from hyper_parallel.config import yaml12
from hyper_parallel.config.schema import json_schema

jsonschema = pytest.importorskip("jsonschema", reason="part of the extra 'dev'")

ROOT = Path(__file__).parents[2]


@cache
def examples() -> Examples:
    return Examples.of(ROOT)


def keys(kind: str) -> list[tuple[tree.Section, str, dict[str, Any]]]:
    """Each key of a kind of file."""
    schema = json_schema(KINDS[kind])
    return [(section, key, field) for section in tree.sections(schema) for key, field in section.keys.items()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_meaning(kind: str) -> None:
    schema = json_schema(KINDS[kind])
    assert [key for section, key, _ in keys(kind) if not run_file_page.meaning(schema, section, key)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_an_example_that_the_schema_takes(kind: str) -> None:
    schema = json_schema(KINDS[kind])
    for section, key, field in keys(kind):
        where = f"{section.paths[0]}.{key}"
        example = examples().best(kind, section.name, key, field)
        assert example not in (None, {}, []), f"{where} has no example; add one to {CHOSEN.relative_to(ROOT)}"
        validator = jsonschema.Draft202012Validator({**field, "$defs": schema["$defs"]})
        assert list(validator.iter_errors(example)) == [], where


@pytest.mark.parametrize("kind", KINDS)
def test_the_chosen_examples_have_no_other_keys(kind: str) -> None:
    schema = json_schema(KINDS[kind])
    for content in yaml12.parse(CHOSEN.read_text(), "examples")[kind]:
        found = list(jsonschema.Draft202012Validator(schema).iter_errors({"extends": "base.yaml", **content}))
        assert [f"{error.json_path}: {error.message}" for error in found] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_every_key_once(kind: str) -> None:
    page = run_file_page.page(kind, examples())
    headings = re.findall(r"^### `(\S+)` ", page, re.M)
    ids = re.findall(r"\{ #(\S+) \}$", page, re.M)
    assert len(ids) == len(set(ids))
    if kind == "run":
        assert len(headings) == len(keys("run"))
    elif kind == "generation":
        assert {"inference.max_tokens", "strategy.memory.device", "workload.requests"} <= set(headings)
    else:
        assert {"rl.algorithm", "rl.staleness", "roles.actor.devices", "task.reward"} <= set(headings)
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= set(ids)


def test_a_key_shows_type_default_meaning_and_example() -> None:
    page = run_file_page.page("run", examples())
    entry = page.split("### `train.log_every`")[1].split("###")[0]
    assert "integer (at least 1) · default `1` · example `log_every: 10`" in entry
    assert "Steps between records of metrics." in entry
    assert "default `[tensorboard]`" in page.split("### `trackers`")[1].split("###")[0]
    assert "**required**" in page.split("### `data.train`")[1].split("###")[0]


def test_every_command_is_shown() -> None:
    page = commands_page.page()
    for name in command.list_commands(click.Context(command)):
        assert f"## hyper-parallel {name}\n" in page
        assert f"Usage: hyper-parallel {name}" in page


def test_every_public_name_is_shown_from_its_home() -> None:
    page = python_page.page(ROOT)
    names = [name for name in hyper_parallel.__all__ if not name.startswith("_")]
    for module, public in {"hyper_parallel": names, "hyper_parallel.checkpoint": checkpoint.__all__}.items():
        for name in public:
            assert f'heading: "{module}.{name}"\n' in page
    for full in re.findall(r"^::: (\S+)$", page, re.M):
        assert defined(full), full
    assert "::: hyper_parallel.shard.parallelize.parallelize\n" in page


def defined(full: str) -> bool:
    """Whether a full name is a module, or defined at the top of one; nothing is imported."""
    path = ROOT / "src" / full.replace(".", "/")
    if path.with_suffix(".py").is_file():
        return True
    name = path.name
    file = path.parent / "__init__.py" if path.parent.is_dir() else path.parent.with_suffix(".py")
    return re.search(rf"^(?:(?:class|def) {name}\b|{name}\b.*=)", file.read_text(), re.M) is not None
