"""Fenced blocks of answers, and which of them is the program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.rl.rewards.program_tests import Block, blocks, program_of

F = "def f(x):\n    return x + 1\n"
INDENTED = "".join(f"   {line}\n" for line in F.splitlines())
QUOTED = "".join(f"> {line}\n" for line in F.splitlines())


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{F}```",
        f"```Python\n{F}```",
        f"```py\n{F}```",
        f"```python3\n{F}```",
        f"```\n{F}```",
        f"~~~python\n{F}~~~",
        f"````python\n{F}````",
        f"```python\n{F}````  ",
        f'```python title="a.py"\n{F}```',
        f"```python:a.py\n{F}```",
        f"``` python\n{F}```",
        f"```{{python}}\n{F}```",
        f"```{{.python .numberLines}}\n{F}```",
        f"```{{python, echo=FALSE}}\n{F}```",
        f"1. do\n   ```python\n{INDENTED}   ```",
        f"1. ```python\n{INDENTED}   ```",
        f"> ```python\n{QUOTED}> ```",
        f"```python\n{F}",
        f"```python\n{F}```\nOutput:\n```\n2\n```",
        f"```python\n{F}```\nOutput:\n```\nx = 5\n```",
        f"```python\n{F}```\nOutput:\n```\n[1, 'a']\n(2, -3)\n```",
        f"```python\n{F}```\n```python\n2\n```",
        f"```python\n{F}```\n```python\n>>> f(1)\n2\n```",
        f"```python\n{F}```\n```text\n2\n```",
        f"```python\n{F}```\n```bash\npython a.py\n```",
        f"```python\nx\n```\nBetter:\n```\n{F}```",
        f"```\n{F}```\n```\n2\n```",
        f"```\nhello world\n```\n```\n{F}```",
        f"`code` and ``more``\n``` `no fence` ```\n```python\n{F}```",
    ],
)
def test_shapes(answer: str) -> None:
    assert program_of(answer) == F


def test_which_part_of_an_answer_is_the_program() -> None:
    assert program_of("x = 1") == "x = 1"
    assert program_of("Text\n```python\na\n```\nmore\n```py\nb\n```\n```bash\nls\n```") == "b\n"
    assert program_of("```\nopen") == "open"
    assert program_of("x = '```'\n") == "x = '```'\n"
    assert program_of("```bash\nls\n```") == "```bash\nls\n```"
    assert len(program_of("```" * 300_000)) == 900_000


def test_fences_in_a_program() -> None:
    program = 'def f():\n    """Usage:\n\n        ```\n        f()\n        ```\n    """\n'
    assert program_of(f"```python\n{program}```") == program
    assert program_of("````python\nx = '''\n```\n'''\n````") == "x = '''\n```\n'''\n"
    assert list(blocks("~~~\n```\n~~~\n```a b\n```")) == [
        Block(language="", text="```\n"),
        Block(language="a", text=""),
    ]


@given(st.text(alphabet="`~> \t\n1.-apython{}x=", max_size=80))
def test_any_text_has_a_program(text: str) -> None:
    assert isinstance(program_of(text), str)
    assert sum(len(block.text) for block in blocks(text)) <= len(text)
