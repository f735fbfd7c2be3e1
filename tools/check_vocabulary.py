"""Refuses private words in names, in modules' first lines and in documents.

    python tools/check_vocabulary.py src/hyper_parallel docs README.md

It checks the names of files, classes and public functions, the first line of each module's docstring, and the prose of
Markdown files. docs/glossary.md has the terms to use.
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
    r"^(?:What|Those|Of|That)\b|\b(?:told|foreseen|seam|so many|by itself|as far as|as ever|laid (?:beside|on)|in turns"
    r"|what is asked|ranks that are not there|the way)\b",
    re.IGNORECASE,
)
"""Turns of phrase in a module's first line, and beginnings that make it a relative clause without a subject."""
DOCUMENT = re.compile(
    r"\b(?:(?:is|are|was|were) told|told (?:apart|in|that|what)|foreseen|so many|by itself|as far as|as ever"
    r"|laid (?:beside|on)|in turns|what is asked|(?:is|are) not there|of its own)\b",
    re.IGNORECASE,
)
"""Turns of phrase in documents, outside of code blocks and quoted output."""


def problems(top: Path) -> Iterator[str]:
    """One line for each name, first line or line of a document with such a word. `top`: a folder or a document."""
    for path in sorted(top.rglob("*.md")) if top.is_dir() else [top]:
        for number, line in _prose(path.read_text()):
            if found := DOCUMENT.search(line):
                yield f"{path}:{number}: the text has {found[0]!r}"
    for path in sorted(top.rglob("*.py")):
        tree = ast.parse(path.read_text())
        if found := NAMES.search(path.stem):
            yield f"{path}:1: the file's name has {found[2]!r}"
        first = (ast.get_docstring(tree) or "").split("\n")[0]
        if found := PROSE.search(first):
            yield f"{path}:1: the first line has {found[0]!r}"
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node.name).lower()
                if found := NAMES.search(words):
                    yield f"{path}:{node.lineno}: {node.name} has {found[2]!r}"


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """The numbered lines of a Markdown text that are neither fenced nor indented code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


def main() -> int:
    found = [line for top in sys.argv[1:] for line in problems(Path(top))]
    for line in found:
        print(line)
    if found:
        print("use the terms of docs/glossary.md")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
