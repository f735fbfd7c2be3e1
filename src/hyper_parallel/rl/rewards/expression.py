r"""A parser for mathematical expressions, plain or in LaTeX, that computes exact values and runs no code.

    sum     := product (("+" | "-") product)*
    product := power (("*" | "/" | nothing) power)*
    power   := "-" power | unit ["^" power]
    unit    := number | letter | "\pi" | "(" sum ")" | "\sqrt{" sum "}" | "\frac{" sum "}{" sum "}"

A product without a sign binds like one with a sign: 1/2x is x/2. A letter is a variable; three letters in a row are a
word, and no product of variables. π is a number of its own.
"""

from __future__ import annotations

import re
from fractions import Fraction

from hyper_parallel.rl.rewards.polynomial import Quotient, atom, constant, square_root

LENGTH, DEPTH = 500, 40
"""Characters of an expression, and levels of nesting."""

_TOKEN = re.compile(r"\s*(\d+\.\d*|\.\d+|\d+|\\[A-Za-z]+|[A-Za-zπ]|[-+*/^(){}\[\]])")
_REPLACED = (
    (re.compile(r"\\(?:left|right|displaystyle|,|;|!|:| )|\\?\$|\\?%|~"), " "),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\(?:cdot|times)|[×·⋅]"), "*"),
    (re.compile(r"\\div|÷"), "/"),
    (re.compile("[−–]"), "-"),
    (re.compile(r"\*\*"), "^"),
    (re.compile("√"), r"\\sqrt "),
    (re.compile(r"(?<![\\A-Za-z])sqrt(?![A-Za-z])"), r"\\sqrt "),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])|π"), r"\\pi "),
    (re.compile(r"(?<=\d),(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\^\{?\s*\\circ\s*\}?|°"), " "),
)
"""Spellings of the same expression; degree, dollar and percent signs are taken as units and left out."""
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}")


def parse(text: str) -> Quotient:
    """The exact value of an expression.

    Raises ValueError, in words, for what is no expression of the grammar, and for one whose value is too large.
    """
    if len(text) > LENGTH:
        raise ValueError(f"the expression has {len(text)} characters, more than {LENGTH}")
    text = _UNIT.sub(" ", text)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    if word := _WORD.search(text):
        raise ValueError(f"{word[0]!r} is a word")
    text, tokens, place = text.strip(), [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"{text[place : place + 10]!r} is no part of an expression")
        tokens.append(match[1])
        place = match.end()
    parser = _Parser(tokens)
    try:
        value = parser.sum(0)
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    if parser.next is not None:
        raise ValueError(f"{parser.next!r} is left over")
    return value


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self, *wanted: str) -> str:
        token = self.next
        if token is None or (wanted and token not in wanted):
            raise ValueError(f"{' or '.join(wanted) or 'a value'} is missing before {token or 'the end'!r}")
        self._place += 1
        return token

    def sum(self, depth: int) -> Quotient:
        if depth > DEPTH:
            raise ValueError(f"the expression is nested deeper than {DEPTH} levels")
        value = self._product(depth)
        while self.next in ("+", "-"):
            sign = self._take()
            other = self._product(depth)
            value = value + other if sign == "+" else value - other
        return value

    def _product(self, depth: int) -> Quotient:
        value = self._power(depth)
        while (token := self.next) is not None and token not in ("+", "-", ")", "}", "]"):
            if token in ("*", "/"):
                self._take()
            # "2 3" and "x 3" are no products, and a mixed number is a sum.
            elif token[0].isdigit() or token[0] == ".":
                raise ValueError(f"a sign is missing before {token!r}")
            elif token == "\\frac" and self._tokens[self._place - 1].isdigit():
                value = self._mixed(value, depth)
                continue
            other = self._power(depth)
            value = value / other if token == "/" else value * other
        return value

    def _mixed(self, whole: Quotient, depth: int) -> Quotient:
        r"""`3\frac{1}{2}` is 3½; `3\frac{x}{2}` is a product."""
        part = self._power(depth)
        if part.rational is None or whole.rational is None:
            return whole * part
        return whole + part if whole.rational >= 0 else whole - part

    def _power(self, depth: int) -> Quotient:
        if depth > DEPTH:
            raise ValueError(f"the expression is nested deeper than {DEPTH} levels")
        if self.next in ("-", "+"):
            negative = self._take() == "-"
            value = self._power(depth + 1)
            return -value if negative else value
        value = self._unit(depth)
        if self.next == "^":
            self._take()
            exponent = self._power(depth + 1).rational
            if exponent is None or exponent.denominator not in (1, 2):
                raise ValueError("an exponent is neither a whole number nor a half")
            if exponent.denominator == 1:
                return value.power(exponent.numerator)
            return _root(value).power(exponent.numerator)
        return value

    def _unit(self, depth: int) -> Quotient:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return constant(Fraction(token.removesuffix(".")))
        if token in ("(", "[", "{"):
            value = self.sum(depth + 1)
            self._take({"(": ")", "[": "]", "{": "}"}[token])
            return value
        if token == "\\frac":
            above = self._argument(depth)
            return above / self._argument(depth)
        if token == "\\sqrt":
            if self.next == "[":
                raise ValueError("a root other than the square root is not supported")
            return _root(self._argument(depth))
        if token.isalpha() or token == "\\pi":
            return atom(token)
        raise ValueError(f"{token!r} is not supported")

    def _argument(self, depth: int) -> Quotient:
        r"""In braces or parentheses, or a single unit, of which `\frac12` takes one digit."""
        token = self.next
        if (
            token is not None
            and len(token) > 1
            and token.isdigit()
            and self._tokens[self._place - 1] != "\\sqrt"
        ):
            self._tokens[self._place : self._place + 1] = list(token)
        return self._unit(depth)


def _root(value: Quotient) -> Quotient:
    if value.rational is None:
        raise ValueError("the square root of an expression with letters is not supported")
    return square_root(value.rational)
