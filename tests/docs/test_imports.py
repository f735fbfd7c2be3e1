"""Imports and names that the documents show exist."""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hyper_parallel.errors import IntegrationError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
IMPORT = re.compile(
    r"^\s*(?:>>> )?(from hyper_parallel[\w.]* import [^\n(]+|import hyper_parallel[\w.]*)", re.M
)
NAME = re.compile(r"`hyper_parallel((?:\.\w+)+)")
ENTRY_POINTS = {"hyper_parallel.backends", "hyper_parallel.optimizers", "hyper_parallel.trackers"}
"""Groups of entry points, which are no modules."""


def imports(text: str) -> Iterator[str]:
    for line in IMPORT.findall(text):
        statement = ast.parse(line.split("#")[0].strip()).body[0]
        if isinstance(statement, ast.ImportFrom):
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
        elif isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)


def found(name: str) -> bool:
    """Whether a dotted name is a module, or what a module has."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_imports_exists(page: Path) -> None:
    text = page.read_text()
    names = [*imports(text), *(f"hyper_parallel{name}" for name in NAME.findall(text))]
    missing = []
    for name in names:
        with contextlib.suppress(IntegrationError):  # of a package that is not installed
            if name not in ENTRY_POINTS and not found(name):
                missing.append(name)
    assert not missing


def test_a_name_that_is_gone_is_seen() -> None:
    assert list(imports("x\n    from hyper_parallel.graph import capture, nothing\n")) == [
        "hyper_parallel.graph.capture",
        "hyper_parallel.graph.nothing",
    ]
    assert found("hyper_parallel.graph.capture")
    assert not found("hyper_parallel.graph.nothing")
