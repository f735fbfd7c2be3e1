"""Tests of programs: right and wrong programs, what counts as the program, and attempts to forge a result."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards.program_tests import code, read_tests

DOUBLE = "```python\ndef double(x):\n    return 2 * x\n```"
TESTS: list[Any] = [{"expression": "double(2)", "value": 4}, "assert double(3) == 6"]


def test_all_or_a_fraction() -> None:
    assert code("", DOUBLE, {"tests": TESTS}) == 1.0
    wrong = [*TESTS, {"expression": "double(1)", "value": 3}, "assert double(1) == 0"]
    assert code("", DOUBLE, {"tests": wrong}) == 0.0
    assert code("", DOUBLE, {"tests": wrong, "score": "fraction"}) == 0.5


def test_standard_input_and_output() -> None:
    program = "n = int(input())\nprint(n * n, end=' \\n\\n')"
    tests = [{"input": "3\n", "output": "9\n"}, {"input": "4", "output": "16"}, {"input": "x", "output": ""}]
    assert code("", program, {"tests": tests, "score": "fraction"}) == pytest.approx(2 / 3)


def test_values_are_compared_as_json() -> None:
    program = "def f():\n    print('noise')\n    return {'a': (1, [2.5, None])}"
    assert code("", program, {"tests": [{"expression": "f()", "value": {"a": [1, [2.5, None]]}}]}) == 1.0
    assert code("", program, {"tests": ["assert f() == {'a': (1, [2.5, None])}"]}) == 1.0
    assert code("", program, {"tests": ["assert f()['a'][0] in {1, 2}"]}) == 1.0
    assert code("", program, {"tests": ["assert f()['a'][0] > 1"]}) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def double(x):\n    while True: pass",
        "class Yes:\n    def __eq__(self, other): return True\ndef double(x): return Yes()",
        "def double(x):\n    import os; os.write(1, b'4'); os._exit(0)",
        "print('4')\nraise SystemExit",
        "def double(x):\n    raise ValueError",
        "def double(x): return '[' * 100000",
        "def double(x):\n    y = []\n    for _ in range(900): y = [y]\n    return y",
        "import json\njson.dumps = lambda value: 'true'\ndef double(x): return 0",
        "",
    ],
)
def test_no_reward_without_the_value(program: str) -> None:
    assert code("", program, {"tests": TESTS[:1], "wall_s": 2.0}) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "print(input())\nexit()",
        "n = input()\nif n:\n    print(n)\n    quit(0)",
        "import sys\nprint(input())\nsys.exit()",
        "print(open('/dev/stdin').read())",
        "import pathlib\nprint(pathlib.Path('/dev/stdin').read_text())",
        "import sys\nsys.stdin = open('/dev/stdin')\nprint(input(), file=open('/dev/stdout', 'w'))",
        "with open('/dev/stdin', 'rb') as f:\n    print(f.read().decode())",
        "print(open(0).read())",
    ],
)
def test_a_script_ends_and_reads_as_it_does_in_a_terminal(program: str) -> None:
    assert code("", program, {"tests": [{"input": "5\n", "output": "5"}]}) == 1.0
    assert code("", program, {"tests": [{"input": "5\n", "output": "6"}]}) == 0.0


def test_a_script_that_exits_behind_its_functions() -> None:
    program = "def double(x):\n    return 2 * x\n\nif __name__ == '__main__':\n    exit()"
    assert code("", program, {"tests": TESTS}) == 1.0
    assert code("", program.replace("exit()", "exit(1)"), {"tests": TESTS}) == 0.0
    assert code("", "exit('done')", {"tests": [{"input": "", "output": ""}]}) == 0.0


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "a list of 1 to 1000 tests"),
        ({"tests": []}, "a list of 1 to 1000 tests"),
        ({"tests": ["f(1)"]}, "test 1 of the row, 'f\\(1\\)', is not one assert"),
        ({"tests": ["assert True", "assert ("]}, "test 2 of the row"),
        ({"tests": [{"input": "a"}]}, "test 1 of the row is none"),
        ({"tests": ["assert True"], "score": "some"}, "it is 'all' or 'fraction'"),
    ],
)
def test_a_wrong_row_is_an_error(task: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        code("", "x = 1", task)


def test_assertions_of_literals_are_judged_outside() -> None:
    [equal, other] = read_tests({"tests": ["assert f(1) == (1, 'a')", "assert f(1) == {1}"]})
    assert (equal.expression, equal.expected) == ("f(1)", (1, "a"))
    assert (other.expression, other.expected) == ("bool(f(1) == {1})", True)
