"""Fenced code blocks of an answer (CommonMark 0.31.2, section 4.5), and which of them is the program.

A fence is three or more backticks or tildes, and its block ends at a line of at least as many of the same. Blocks may
stand in list items and quotes: what stands before the opening fence is taken off each line. Deeper indentation than a
list item's, which CommonMark reads as text, is a fence here too: models write it.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

_OPENING = re.compile(
    r"(?P<before>(?:[ \t>]|(?:[-*+]|\d{1,9}[.)])[ \t])*)(?P<fence>`{3,}|~{3,})(?P<info>[^\r\n]*)"
)
_LANGUAGE = re.compile(r"[{.\s]*([\w+#-]*)")
_PYTHON = re.compile(r"(?:i?python|py)[\d.]*")
_LONGEST = 200_000
"""Characters of a block without a language that is looked into."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block."""

    language: str
    """In lower case: the first word of the info string, of `{.python}` or `python:main.py` also; empty without one."""
    text: str


def program_of(answer: str) -> str:
    """The program in an answer: the last block that is marked as Python, or, if it comes later and defines, imports,
    loops, branches or prints, one without a language. Without these, the last block without a language; without a
    block, the whole answer.

    Values alone, and a transcript of the interpreter (`>>> f(1)`), are output and no program.
    """
    program, unmarked = None, None
    for block in blocks(answer):
        if not block.text.strip() or _is_output(block.text):
            continue
        if _PYTHON.fullmatch(block.language):
            program = block.text
        elif not block.language:
            unmarked = block.text
            if program is not None and _is_script(block.text):
                program = block.text
    if program is not None:
        return program
    return unmarked if unmarked is not None else answer


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a text, in order; the last one may have no end."""
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if opening is None:
            found = _OPENING.match(line)
            # The info string of backticks has none: a line of `code` in the text is no fence.
            if found is not None and not (found["fence"][0] == "`" and "`" in found["info"]):
                opening, lines = found, []
        elif _closes(line, opening):
            yield _block(opening, lines)
            opening = None
        else:
            lines.append(_without(opening["before"], line))
    if opening is not None:
        yield _block(opening, lines)


def _closes(line: str, opening: re.Match[str]) -> bool:
    """Whether a line is the closing fence: at most three spaces further in than the opening one."""
    rest = _without(opening["before"] + "   ", line).rstrip()
    return len(rest) >= len(opening["fence"]) and set(rest) == {opening["fence"][0]}


def _without(before: str, line: str) -> str:
    """A line without what stands before the opening fence, as far as it has that."""
    marks = " \t>" if ">" in before else " \t"
    width = 0
    while width < min(len(before), len(line)) and line[width] in marks:
        width += 1
    return line[width:]


def _block(opening: re.Match[str], lines: list[str]) -> Block:
    language = _LANGUAGE.match(opening["info"])
    assert language is not None, "it matches an empty text"
    return Block(language=language[1].lower(), text="".join(lines))


def _is_output(text: str) -> bool:
    """Whether a block holds values alone, or what an interpreter has shown."""
    if text.lstrip().startswith(">>>"):
        return True
    tree = _parsed(text)
    return tree is not None and all(
        isinstance(line, ast.Expr)
        and not any(isinstance(node, ast.Call | ast.Name) for node in ast.walk(line))
        for line in tree.body
    )


def _is_script(text: str) -> bool:
    """Whether a block does more than name values, as output that is like Python does (`x = 5`)."""
    tree = _parsed(text)
    return tree is not None and any(
        isinstance(
            node,
            ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom | ast.For | ast.While
            | ast.If | ast.With | ast.Try,
        )
        or (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print")
        for node in ast.walk(tree)
    )  # fmt: skip


def _parsed(text: str) -> ast.Module | None:
    if len(text) > _LONGEST:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
