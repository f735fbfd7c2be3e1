"""The page of public Python names, whose text mkdocstrings takes from docstrings without importing the package."""

from __future__ import annotations

import ast
from pathlib import Path

MODULES = {
    "hyper_parallel.integration.transformers": "Trainers",
    "hyper_parallel.checkpoint": "Checkpoints",
    "hyper_parallel.cluster": "Clusters",
    "hyper_parallel.rl.losses": "Losses of reinforcement learning",
}
"""Modules whose public names users import beside those of `hyper_parallel` itself, with the title of their section."""


def public_names(file: Path) -> list[str]:
    """`__all__` of a package's source file without private names; where it has none, the package's modules."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("_")]
    return sorted(module.stem for module in file.parent.glob("*.py") if not module.stem.startswith("_"))


def home(source: Path, module: str, name: str) -> str:
    """The full name of an object where it is defined: imports of packages are followed.

    A package may have a module with the name of an object that it imports; the full name is not ambiguous.
    """
    file = source / module.replace(".", "/") / "__init__.py"
    if file.is_file():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and name in (one.name for one in node.names):
                return home(source, node.module, name)
    return f"{module}.{name}"


def page(root: Path) -> str:
    """Markdown that mkdocstrings fills."""
    source = root / "src"
    lines = [
        "# Python",
        "",
        "`import hyper_parallel as hp` imports each public name of the package on first use.",
        "",
    ]
    for module, title in {"hyper_parallel": "The package", **MODULES}.items():
        lines += [f"## {title}", "", f"Public names of `{module}`.", ""]
        for name in public_names(source / module.replace(".", "/") / "__init__.py"):
            shown = f"{module}.{name}"
            lines += [f"::: {home(source, module, name)}", "    options:", f'      heading: "{shown}"']
            lines += [f'      toc_label: "{name}"', ""]
    return "\n".join(lines)
