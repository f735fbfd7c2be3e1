"""The math verifier: values are compared exactly, words as texts, and hostile answers end at once."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards.expression import parse
from hyper_parallel.rl.rewards.math_expression import equal, extracted, math_expression

EQUAL = [
    ("1/2", "0.5"),
    (r"\frac{2}{4}", "1/2"),
    (r"\dfrac12", "0.5"),
    ("x = 5", "5"),
    ("(1,2)", "( 1, 4/2 )"),
    (r"\{2, 1\}", r"\{1, 2\}"),
    (r"\left(1, 2\right)", "(1, 2)"),
    (r"2\sqrt{8}", r"4\sqrt2"),
    (r"\frac{1}{\sqrt{2}}", r"\sqrt{2}/2"),
    (r"\sqrt{2}\sqrt{3}", r"\sqrt{6}"),
    (r"\sqrt{\frac{9}{4}}", "1.5"),
    ("4^{1/2}", "2"),
    ("8^{-1}", "0.125"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"2\pi r", "pi*2r"),
    ("1,000,000", "1000000"),
    (r"3\frac{1}{2}", "7/2"),
    (r"-3\frac12", "-3.5"),
    (r"50\%", "50"),
    (r"\$5", "5"),
    (r"90^\circ", "90"),
    (r"5\text{ cm}", "5"),
    ("1, 2", "1,2"),
    ("-2^2", "-4"),
    ("blue  whale", "blue whale"),
    ("y = 2x + 1", "y=1+2x"),
]
DIFFERENT = [
    ("0.333", "1/3"),
    ("3.14", r"\pi"),
    ("[1,2)", "(1,2)"),
    ("(1,2)", "(2,1)"),
    (r"\{1,1,2\}", r"\{1,2,2\}"),
    ("x", "y"),
    ("y = 2", "x = 2"),
    ("12", "1 2"),
    ("listen", "silent"),
    (r"\sqrt[3]{8}", r"8\sqrt{3}"),
    (r"\sqrt{-4}", "2"),
    ("1/0", "1/0 + 1"),
    ("", ""),
    ("()", ""),
    ("1+", "1"),
    ("__import__('os').system('true')", "0"),
]


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_equal(left: str, right: str) -> None:
    assert equal(left, right)
    assert equal(right, left)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_different(left: str, right: str) -> None:
    assert not equal(left, right)
    assert not equal(right, left)


NUMBERS = st.integers(-20, 20).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS | st.sampled_from("xy"),
    lambda inner: (
        st.tuples(inner, st.sampled_from("+-*/"), inner).map(
            lambda parts: f"({parts[0]}){parts[1]}({parts[2]})"
        )
        | st.tuples(inner, st.integers(0, 3)).map(lambda parts: f"({parts[0]})^{parts[1]}")
    ),
    max_leaves=6,
)


@given(EXPRESSIONS, EXPRESSIONS)
def test_equality_is_that_of_sympy(left: str, right: str) -> None:
    try:
        found = parse(left).equals(parse(right))
    except ValueError:
        return  # a division by zero
    one, other = (sympy.sympify(text.replace("^", "**"), rational=True) for text in (left, right))
    assert found == (sympy.cancel(sympy.together(one - other)) == 0)


@given(EXPRESSIONS)
def test_an_expanded_expression_equals_itself(text: str) -> None:
    try:
        value = parse(text)
    except ValueError:
        return
    expanded = str(sympy.expand(sympy.sympify(text.replace("^", "**"), rational=True)))
    assert value.equals(parse(expanded))


@given(st.fractions(min_value=0, max_value=1000, max_denominator=100))
def test_a_square_root_squares_to_its_number(number: Fraction) -> None:
    root = parse(rf"\sqrt{{{number}}}")
    assert (root * root).rational == number


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9^9",
        "9" * 400 + "^64",
        "(" * 400,
        "(" * 200 + "1" + ")" * 200,
        "-" * 490 + "1",
        r"\sqrt{99999999999999999999999}",
        "(a+b+c+d+f+g+h+i)^60",
        "2^64^64",
        "((((((x+y+1)^8+z)^8+w)^8+v)^8+u)^8+t)^8",
        r"\frac" * 90,
        "1" * 100_000,
    ],
)
def test_hostile_expressions_are_no_values(text: str) -> None:
    assert not equal(text, "3")


@given(st.text(alphabet="0123456789xyab+-*/^(){}[]\\., fracsqrtpi=\n", max_size=60))
def test_any_text_is_compared_without_an_error(text: str) -> None:
    assert equal(text, text) == bool(text.strip())
    equal(text, "3")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (r"First \boxed{1}, so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{7", r"\boxed{7"),
        ("We add.\n#### 42\n", "42"),
        ("So the answer is: 12.", "12"),
        ("Answer: 3 apples", "3 apples"),
        ("17", "17"),
    ],
)
def test_the_answer_in_a_text(answer: str, found: str) -> None:
    assert extracted(answer) == found


def test_the_reward() -> None:
    assert math_expression("", r"It is \boxed{0.5}", {"answer": r"\frac12"}) == 1.0
    assert math_expression("", "It is 0.5, I think", {"answer": "0.5"}) == 0.0
    assert math_expression("", "3", {"answer": ["2", "3"]}) == 1.0
    bad: list[dict[str, Any]] = [{}, {"answer": 3}, {"answer": []}]
    for task in bad:
        with pytest.raises(DataError, match="under the key 'answer'"):
            math_expression("", "3", task)
