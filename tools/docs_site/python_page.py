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


def page(root: Path) -> str:
    """Markdown that mkdocstrings fills."""
    lines = [
        "# Python",
        "",
        "`import hyper_parallel as hp` imports each public name of the package on first use.",
        "",
    ]
    for module, title in {"hyper_parallel": "The package", **MODULES}.items():
        lines += [f"## {title}", "", f"Public names of `{module}`.", ""]
        for name in public_names(root / "src" / module.replace(".", "/") / "__init__.py"):
            lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)
