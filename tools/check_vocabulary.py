"""Names and first lines speak the field's language: words that say nothing to a stranger are refused.

    python tools/check_vocabulary.py src/hyper_parallel

Checked are the names of files, classes and public functions, and the first line of each module's docstring. The terms
to use are in docs/glossary.md.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = re.compile(
    r"(^|_)(told|asked|foreseen|kept|settled?|sooner|nearer|laid|seam|apart|usual|pieces|nouns|things?)($|_)"
)
"""Participles, adverbs and private words, as parts of a name."""
PROSE = re.compile(
    r"\b(told|foreseen|seam|so many|by itself|as far as|laid beside|ranks that are not there|the way)\b",
    re.IGNORECASE,
)


def problems(folder: Path) -> Iterator[str]:
    """One line for each name or first line that has such a word."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        if found := NAMES.search(path.stem):
            yield f"{path}:1: the file's name has {found[2]!r}"
        first = (ast.get_docstring(tree) or "").split("\n")[0]
        if found := PROSE.search(first):
            yield f"{path}:1: the first line has {found[1]!r}"
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.name).lower()
                if found := NAMES.search(words):
                    yield f"{path}:{node.lineno}: {node.name} has {found[2]!r}"


def main() -> int:
    found = [line for folder in sys.argv[1:] for line in problems(Path(folder))]
    for line in found:
        print(line)
    if found:
        print("use the terms of docs/glossary.md")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
