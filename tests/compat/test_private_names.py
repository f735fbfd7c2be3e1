"""Private modules of PyTorch are imported in one folder, so that a new version of it fails in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hyper_parallel

ROOT = Path(hyper_parallel.__file__).parent


def _imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _private(name: str) -> bool:
    first, *others = name.split(".")
    return first == "torch" and any(part.startswith("_") for part in others)


def test_only_compat_imports_private_names_of_torch() -> None:
    found = {
        (path.relative_to(ROOT).parts[0], name)
        for path in ROOT.rglob("*.py")
        for name in _imported(path.read_text())
        if _private(name)
    }
    assert {folder for folder, _ in found} == {"compat"}, sorted(found)
