r"""Equality of mathematical answers: numbers, fractions, roots and simple algebra, in plain text or LaTeX.

The answer is the last `\boxed{...}`; without one, the rest of the line after the last `####` or "answer is"; without
either, the whole text. Both sides are computed exactly (`expression`), so that 1/2, 0.5 and \frac{2}{4} are equal and
0.333 is not 1/3. A tuple or an interval is compared element by element in its order, a set in any order.

Row: `answer`, a text or a list of texts of which one must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hyper_parallel.rl.rewards.exact_match import normalized, reference_answers
from hyper_parallel.rl.rewards.expression import LENGTH, parse
from hyper_parallel.rl.rewards.reward import Prompt

_PARTS = 32
"""Elements of a tuple or a set."""
_MARK = re.compile(r"####|answer\s*(?:is|=|:)\s*:?", re.IGNORECASE)
_EQUATION = re.compile(r"\s*(\\?[A-Za-z]{1,8}\s*(?:\([a-z]\)\s*)?)=(?!=)(.*)", re.DOTALL)
_THOUSANDS = re.compile(r"(?<=\d),\d{3}(?!\d)")
_BRACES = (("\\{", "\\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"))


def math_expression(prompt: Prompt, answer: str, task: Mapping[str, Any]) -> float:
    """1 if the answer equals a reference answer, else 0. Raises DataError for a row without one."""
    found = extracted(answer)
    return float(any(equal(found, extracted(text)) for text in reference_answers(task)))


def extracted(answer: str) -> str:
    """The part of a text that is its answer."""
    start = answer.rfind("\\boxed")
    if start >= 0 and (boxed := _braced(answer, start + len("\\boxed"))) is not None:
        return boxed.strip()
    marks = list(_MARK.finditer(answer))
    text = answer[marks[-1].end() :].strip().partition("\n")[0] if marks else answer
    return text.strip().rstrip(".").strip()


def equal(left: str, right: str) -> bool:
    """Whether two answers are equal as texts or as values. What cannot be parsed equals only the same text."""
    if max(len(left), len(right)) > LENGTH:
        return False
    if normalized(left) == normalized(right):
        return bool(normalized(left))
    (name, left), (other_name, right) = _named(left), _named(right)
    if name and other_name and name != other_name:
        return False
    one, other = _elements(left), _elements(right)
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return False
    kind, lefts, rights = one[0], one[1], list(other[1])
    for part in lefts:
        candidates = rights if kind == "\\{\\}" else rights[:1]
        match = next((index for index, candidate in enumerate(candidates) if _same(part, candidate)), None)
        if match is None:
            return False
        del rights[match]
    return True


def _same(left: str, right: str) -> bool:
    if normalized(left) == normalized(right):
        return True
    try:
        return parse(left).equals(parse(right))
    except ValueError:
        return False


def _named(text: str) -> tuple[str, str]:
    """The left side of "x = 5", which an answer may leave out, and the rest."""
    equation = _EQUATION.fullmatch(text)
    return ("".join(equation[1].split()), equation[2].strip()) if equation else ("", text)


def _elements(text: str) -> tuple[str, list[str]]:
    """(the kind of braces, the elements); a single value is its own element, of the kind ""."""
    text = re.sub(r"\\(?:left|right|big|Big)(?![A-Za-z])", "", text).strip()
    for opening, closing in _BRACES:
        if text.startswith(opening) and text.endswith(closing):
            parts = _split(text[len(opening) : -len(closing)])
            # One number in parentheses is that number, and so is "(x+1)(x+2)", whose commas are none.
            if parts is not None and (len(parts) > 1 or opening == "\\{"):
                return opening + closing, parts
    parts = _split(text, spaced=True)
    return (",", parts) if parts is not None and len(parts) > 1 else ("", [text])


def _split(text: str, spaced: bool = False) -> list[str] | None:
    """At the commas outside of braces; None if these are not balanced. `spaced`: not where they divide thousands."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return None
        if letter == "," and depth == 0 and not (spaced and _THOUSANDS.match(text, place)):
            parts.append(text[start:place].strip())
            start = place + 1
    parts.append(text[start:].strip())
    return parts if depth == 0 and len(parts) <= _PARTS else None


def _braced(text: str, place: int) -> str | None:
    """What stands between the brace at `place` and the one that closes it."""
    rest = text[place:].lstrip()
    if not rest.startswith("{"):
        return None
    depth = 0
    for index, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:index]
    return None
