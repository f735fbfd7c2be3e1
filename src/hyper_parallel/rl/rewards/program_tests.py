"""Tests of a program that a model wrote: each test runs in the sandbox, and is judged outside of it.

The program is the last fenced program of the answer (`fences`). Row: `tests`, a list of

- `{"input": text, "output": text}`: the program reads standard input; outputs are compared without trailing spaces;
- `{"expression": "f(1, 2)", "value": 3}`: evaluated after the program; the value is compared as JSON;
- `"assert f(1, 2) == 3"`: as the second kind where the right side is a literal of JSON. Any other assertion is
  evaluated beside the program, which can therefore forge its result; prefer the other kinds;

and optional `score` (`all`: 1 if all tests pass, the default, or `fraction`), `wall_s` (for each test) and
`memory_bytes`. Expected outputs and values never enter the sandbox.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards.reward import Prompt
from hyper_parallel.rl.rewards.sandbox import Isolation, Limits, run
from hyper_parallel.untrusted_files import parse_json

_TESTS = 1000

_HARNESS = """\
import os, sys
def _call(program, expression):
    out = os.dup(1)
    os.dup2(2, 1)
    names = sys.modules["__main__"].__dict__
    try:
        exec(compile(program, "program.py", "exec", dont_inherit=True), names)
    except SystemExit as end:  # a script's own end, behind its functions
        if end.code:
            raise
    value = eval(compile(expression, "expression", "eval", dont_inherit=True), names)
    import json
    os.write(out, json.dumps(value).encode())
_call({program!r}, {expression!r})
"""


@dataclass(frozen=True, kw_only=True)
class Test:
    """One test: of standard output (`expression` is None), or of an expression's value."""

    __test__ = False  # no test of pytest's

    stdin: str = ""
    expression: str | None = None
    expected: Any = None

    def passes(self, program: str, limits: Limits, isolation: Isolation) -> bool:
        """Whether the program ends without error and gives what is expected."""
        if self.expression is None:
            outcome = run(program, self.stdin.encode(errors="replace"), limits, isolation)
            return outcome.succeeded and _lines(outcome.stdout.decode(errors="replace")) == _lines(
                self.expected
            )
        outcome = run(_HARNESS.format(program=program, expression=self.expression), b"", limits, isolation)
        if not outcome.succeeded:
            return False
        try:
            return _same(parse_json(outcome.stdout), self.expected)
        except ValueError:
            return False


def code(
    prompt: Prompt, answer: str, task: Mapping[str, Any], *, isolation: Isolation = "preferred"
) -> float:
    """The fraction of tests that the answer's program passes, or 1 if it passes all and else 0 (`score`).

    `isolation`: see `sandbox.run`. Raises DataError for a row whose tests are none.
    """
    tests = read_tests(task)
    score = task.get("score", "all")
    if score not in ("all", "fraction"):
        raise DataError(f"the row's score is {score!r}; it is 'all' or 'fraction'")
    default = Limits()
    wall_s = float(task.get("wall_s", default.wall_s))
    limits = Limits(
        wall_s=wall_s,
        cpu_s=max(1, round(wall_s + 0.5)),
        memory_bytes=int(task.get("memory_bytes", default.memory_bytes)),
    )
    program = program_of(answer)
    if score == "all":
        return float(all(test.passes(program, limits, isolation) for test in tests))
    return sum(test.passes(program, limits, isolation) for test in tests) / len(tests)


def read_tests(task: Mapping[str, Any]) -> list[Test]:
    """The tests of a row. Raises DataError, which names the test."""
    given = task.get("tests")
    if not isinstance(given, list) or not given or len(given) > _TESTS:
        raise DataError(f"the row needs a list of 1 to {_TESTS} tests under the key 'tests'")
    return [_test(test, number) for number, test in enumerate(given, 1)]


def _test(given: Any, number: int) -> Test:
    if isinstance(given, str):
        return _assertion(given, number)
    match given:
        case {"input": str(stdin), "output": str(expected)} if len(given) == 2:
            return Test(stdin=stdin, expected=expected)
        case {"expression": str(expression), "value": value} if len(given) == 2:
            return Test(expression=expression, expected=value)
    raise DataError(
        f"test {number} of the row is none; write {{'input': text, 'output': text}}, {{'expression': text, 'value': "
        "JSON}} or an assert statement"
    )


def _assertion(text: str, number: int) -> Test:
    try:
        [statement] = ast.parse(text.strip()).body
    except (SyntaxError, ValueError) as error:
        raise DataError(
            f"test {number} of the row, {text[:60]!r}, is not one assert statement; mend it"
        ) from error
    if not isinstance(statement, ast.Assert):
        raise DataError(f"test {number} of the row, {text[:60]!r}, is not one assert statement; mend it")
    match statement.test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            try:
                expected = ast.literal_eval(right)
                if _same(json.loads(json.dumps(expected)), expected):
                    return Test(expression=ast.unparse(left), expected=expected)
            except (TypeError, ValueError):
                pass
    return Test(expression=f"bool({ast.unparse(statement.test)})", expected=True)


def _same(found: Any, expected: Any) -> bool:
    """Equality of JSON values; a tuple of the expected one is a list."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(found, list)
            and len(found) == len(expected)
            and all(_same(*pair) for pair in zip(found, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(_same(found[key], value) for key, value in expected.items())
        )
    return bool(found == expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


# Fenced code blocks of an answer (CommonMark 0.31.2, section 4.5), and which of them is the program.
#
# A fence is three or more backticks or tildes, and its block ends at a line of at least as many of the same. Blocks may
# stand in list items and quotes: what stands before the opening fence is taken off each line. Deeper indentation than a
# list item's, which CommonMark reads as text, is a fence here too: models write it.

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
