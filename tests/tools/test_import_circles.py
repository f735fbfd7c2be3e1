"""No files of the package import each other: also not inside functions, nor for types alone."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in (SRC / "hyper_parallel").rglob("*.py")}


def nearest_module(name: str) -> str | None:
    """The module that a dotted name is, or that it is a name of; None outside of the package."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def imported_by(module: str) -> set[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import, which this test does not read"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {found for found in map(nearest_module, names) if found not in (None, module)}  # type: ignore[misc]


def test_no_files_import_each_other() -> None:
    graph = {module: imported_by(module) for module in MODULES}
    assert sum(map(len, graph.values())) > 1000
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " is imported by ".join(error.args[1]))
