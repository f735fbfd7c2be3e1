"""The schema that editors use takes what the loader takes: our own examples and the fragments in the documents."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from harness.examples import run_files
from hyper_parallel import config
from hyper_parallel.cli.schema import schema as command
from hyper_parallel.config import RunConfig, yaml12
from hyper_parallel.config.rl import load_rl
from hyper_parallel.errors import ConfigError
from hyper_parallel.strategy import AXIS_NAMES, Strategy

jsonschema = pytest.importorskip("jsonschema", reason="part of the extra 'dev'")

ROOT = Path(__file__).parents[2]
# Files of `rl` have other sections, and so have those of `simulate --rl`.
RL_EXAMPLES = sorted(
    file for file in (ROOT / "examples" / "rl").glob("*.yaml") if not file.name.startswith("simulate-")
)
EXAMPLES = run_files()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```ya?ml\n(.*?)^```", re.M | re.S)


@cache
def printed(*options: str) -> Any:
    """The schema as the command prints it, ready to check."""
    found = json.loads(CliRunner().invoke(command, options, catch_exceptions=False).output)
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


def problems(validator: Any, content: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(content)]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_the_examples(file: Path) -> None:
    content = yaml12.parse(file.read_text(), file.name)
    assert problems(printed(), content) == []
    config.load(file)


@pytest.mark.parametrize("file", RL_EXAMPLES, ids=lambda file: file.name)
def test_the_examples_of_reinforcement_learning(file: Path) -> None:
    content = yaml12.parse(file.read_text(), file.name)
    assert problems(printed("--rl"), content) == []
    load_rl(file)


def test_files_of_generation() -> None:
    assert problems(printed("--generate"), {"version": 1, "inference": {"max_tokens": 40}}) == []
    assert problems(printed("--generate"), {"version": 1, "inference": {"tokens": 40}})
    assert problems(printed("--generate"), {"version": 1, "strategy": "auto"})


@pytest.mark.parametrize(
    "roles",
    [
        "auto",
        {"split": "auto", "devices": 4, "actor": {"strategy": {"axes": {"replicate": "auto", "tensor": 2}}}},
    ],
    ids=str,
)
def test_roles_that_are_auto(roles: Any, tmp_path: Path) -> None:
    [example] = [one for one in RL_EXAMPLES if one.name == "grpo-sort.yaml"]
    base = yaml12.parse(example.read_text(), "base")
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps({**base, "roles": roles}))
    assert load_rl(file).roles.open
    assert problems(printed("--rl"), {**base, "roles": roles}) == []
    assert problems(printed("--rl"), {**base, "roles": "even"})


def fragments() -> Iterator[tuple[str, str]]:
    """Every YAML block of the documents, with the kind of file that all its keys belong to."""
    run, strategy = {*RunConfig.model_fields, "extends"}, {*Strategy.model_fields, "extends"}
    for page in PAGES:
        for number, block in enumerate(_BLOCK.findall(page.read_text()), 1):
            content = yaml12.parse(block, page.name)
            keys = set(content) if isinstance(content, dict) else set()
            kind = "run" if keys <= run else "strategy" if keys <= strategy else "other"
            if keys and kind != "other":
                yield f"{page.name} block {number}", json.dumps([kind, content])


FRAGMENTS = dict(fragments())


@pytest.mark.parametrize("where", FRAGMENTS)
def test_the_documents(where: str) -> None:
    kind, content = json.loads(FRAGMENTS[where])
    # A fragment is laid on a file that has the rest.
    validator = printed("--strategy") if kind == "strategy" else printed()
    assert problems(validator, {"extends": "the-rest.yaml", **content}) == []


def test_fragments_are_found() -> None:
    assert len(FRAGMENTS) >= 10
    assert {json.loads(value)[0] for value in FRAGMENTS.values()} == {"run", "strategy"}


RUN = {"version": 1, "out": "o", "model": {"path": "m"}, "data": {"train": "t"}}


@pytest.mark.parametrize(
    "changes",
    [
        *({"strategy": {"axes": {axis: 2}}} for axis in (*AXIS_NAMES, "tensor")),
        {"strategy": {"axes": {"shard": 2, "expert": 2}}},
        {"strategy": {"axes": {"tensor": "auto"}}},
        {"strategy": "auto"},
        {"strategy": {"memory": {"device": "10GiB", "host": 4096}}},
        {"train": {"optimizer": {"lr": 0.1}}},
    ],
    ids=str,
)
def test_what_the_loader_takes_the_schema_takes(changes: dict[str, Any]) -> None:
    config.from_dict({**RUN, **changes})
    assert problems(printed(), {**RUN, **changes}) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": {"axes": {"tensors": 2}}},
        {"strategy": {"axes": {"order": ["shard"]}}},
        {"strategy": {"axes": {"tensor": 0}}},
        {"train": {"steps": "many"}},
        {"version": 2},
    ],
    ids=str,
)
def test_what_the_loader_refuses_the_schema_refuses(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config.from_dict({**RUN, **changes})
    assert problems(printed(), {**RUN, **changes})
