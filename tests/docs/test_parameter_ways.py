"""Ways of parameters in docs/architecture.md: no file twice, neighbours tied by an import, and none of it upward."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hyper_parallel"
SECTION = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## One parameter")[1]
WAYS = re.findall(r"^\|.*→.*\|$", SECTION, re.MULTILINE)
LAYERS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
    "contracts"
][0]
"""The contract of imports between the folders, highest first."""


def imports(path: str, other: str) -> bool:
    """Whether a file names another one, or takes names from its package, or that package."""
    text = (PACKAGE / path).read_text(encoding="utf-8")
    module = "hyper_parallel." + other.removesuffix(".py").replace("/", ".")
    package = module.rpartition(".")[0]
    above, _, folder = package.rpartition(".")
    ways = (
        rf"\b{re.escape(module)}\b",
        rf"\bfrom {re.escape(package)} import\b",
        rf"\bfrom {re.escape(above)} import .*\b{folder}\b",
    )
    return any(re.search(way, text) for way in ways)


def height(path: str) -> int:
    """The layer of a file's folder, from the highest."""
    folder = path.split("/")[0]
    return next(i for i, names in enumerate(LAYERS["layers"]) if folder in names.split(" | "))


def broken(way: str) -> list[str]:
    """What is wrong with a way: `a` → `b` is an import, `a` ⇢ `b` a call by name."""
    cells = re.findall(r"(⇢|→)?\s*`([\w/]+\.py)`", way.split("|")[-2])
    files = [name for _, name in cells]
    found = [f"{name} twice" for name in set(files) if files.count(name) > 1]
    for (_, before), (arrow, after) in itertools.pairwise(cells):
        down, back = imports(before, after), imports(after, before)
        if arrow == "→" and not (down or back):
            found.append(f"{before} and {after}: no import")
        if (down and height(before) > height(after)) or (back and height(after) > height(before)):
            found.append(f"{before} and {after}: an import upward")
    return found


def test_all_four_ways_are_there() -> None:
    assert {
        key for key in ("axes", "lr", "memory.device", "kv_dtype") if any(f"{key}`" in way for way in WAYS)
    } == {
        "axes",
        "lr",
        "memory.device",
        "kv_dtype",
    }


@pytest.mark.parametrize("way", WAYS, ids=[way.split("|")[1].strip(" `") for way in WAYS])
def test_each_file_is_tied_to_the_next_one(way: str) -> None:
    assert broken(way) == []


def test_a_wrong_way_is_found() -> None:
    assert broken("| x | `cli/train.py` → `layout/mesh.py` → `cli/train.py` |") == [
        "cli/train.py twice",
        "cli/train.py and layout/mesh.py: no import",
        "layout/mesh.py and cli/train.py: no import",
    ]
