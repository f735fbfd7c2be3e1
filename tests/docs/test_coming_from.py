"""The pages "coming from": our keys exist and take the values, the examples load, the links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel import config
from hyper_parallel.config import RunConfig, yaml12
from hyper_parallel.config.from_deepspeed import convert
from hyper_parallel.config.schema import field_at, json_schema, nest

jsonschema = pytest.importorskip("jsonschema", reason="part of the extra 'dev'")

FOLDER = Path(__file__).parents[2] / "docs" / "coming-from"
PAGES = sorted(FOLDER.glob("*.md"))
SECTIONS = "|".join(RunConfig.model_fields)
OURS = re.compile(rf"(?:{SECTIONS})(?:\.[a-z_]+)*(?:: .+)?")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def cells(page: Path) -> list[str]:
    """Our settings: those in the second column of the tables, and those in remarks that name a section."""
    found: list[str] = []
    for line in page.read_text().splitlines():
        columns = re.split(r" \| ", line.strip("| "))
        if line.startswith("| ") and len(columns) >= 2:
            found += re.findall(r"`([^`]+)`", columns[1])
            found += [
                one for one in re.findall(r"`([^`]+)`", columns[-1]) if OURS.fullmatch(one) and "." in one
            ]
    return [one for one in dict.fromkeys(found) if not one.startswith(("hyper-parallel", '"auto"'))]


def problem(setting: str, validator: Any) -> str | None:
    """Why a setting, ``key`` or ``key: value``, is none of a run file."""
    key, colon, value = setting.partition(": ")
    if not OURS.fullmatch(setting):
        return "no section of a run file"
    path = tuple(key.split("."))
    if field_at(RunConfig, path) is None and key != "strategy.axes.tensor":  # another name of tensor_x
        return "no key of a run file"
    content = (
        {"extends": "rest.yaml", **nest(path, yaml12.parse(value, setting))} if colon else {"extends": "x"}
    )
    return next((str(error.message) for error in validator.iter_errors(content)), None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_of_a_table_is_one_of_the_schema(page: Path) -> None:
    validator = jsonschema.Draft202012Validator(json_schema(RunConfig))
    settings = [one for one in cells(page) if "." in one or OURS.fullmatch(one)]
    wrong = {one: why for one in settings if (why := problem(one, validator))}
    assert not wrong
    assert len(settings) >= 20


def test_a_setting_that_is_none_is_seen() -> None:
    validator = jsonschema.Draft202012Validator(json_schema(RunConfig))
    for setting in ("strategy.memori", "strategy.memory.recompute: full", "train.optimizer.rate", "stage"):
        assert problem(setting, validator), setting
    for setting in (
        "strategy.memory.recompute",
        "train.clip: null",
        "train.optimizer.betas",
        "strategy: auto",
    ):
        assert problem(setting, validator) is None, setting


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_run_files_load(page: Path) -> None:
    blocks = [
        yaml12.parse(text, page.name) for kind, text in BLOCK.findall(page.read_text()) if kind == "yaml"
    ]
    ours = [one for one in blocks if set(one) <= {*RunConfig.model_fields, "extends"}]
    base: dict[str, Any] = {"version": 1, "out": "o", "model": {"path": "m"}, "data": {"train": "t"}}
    for block in ours:
        config.from_dict({**base, **{key: value for key, value in block.items() if key != "extends"}})
    assert ours


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]*))?\)", page.read_text()):
        file = (page.parent / target).resolve()
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if file.suffix == ".md" else []
        slugs = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
        assert not anchor or anchor in slugs, f"{target}#{anchor}"


def test_the_conversion_is_what_the_command_writes() -> None:
    blocks = BLOCK.findall((FOLDER / "deepspeed.md").read_text())
    content = json.loads(next(text for kind, text in blocks if kind == "json"))
    shown = next(text for kind, text in blocks if kind == "yaml")
    assert convert(content, devices=8).text == shown
