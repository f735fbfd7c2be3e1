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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards.fences import program_of
from hyper_parallel.rl.rewards.reward import Prompt
from hyper_parallel.rl.rewards.sandbox import Isolation, Limits, run
from hyper_parallel.untrusted import parse_json

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
