"""Answers compared with references: exact match of normalized texts, and equality of mathematical expressions.

`exact_match` takes a row with `answer` (a text, or a list of texts of which one must match), and optionally `extract`
(a regular expression; its last match counts, and in it the first group if it has one) and `ignore_case`.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from hyper_parallel.errors import DataError
from hyper_parallel.rl.rewards import process_limits
from hyper_parallel.rl.rewards.reward import Prompt


def exact_match(prompt: Prompt, answer: str, task: Mapping[str, Any]) -> float:
    """1 if the answer, or what `extract` finds in it, is a reference answer; else 0. Raises DataError for a row without
    one, or with a wrong expression.
    """
    found: str | None = answer
    if "extract" in task:
        matches = list(_expression(task["extract"]).finditer(answer))
        found = (matches[-1][1] if matches[-1].re.groups else matches[-1][0]) if matches else None
    if found is None:
        return 0.0
    fold = bool(task.get("ignore_case", False))
    return float(normalized(found, fold) in {normalized(text, fold) for text in reference_answers(task)})


def reference_answers(task: Mapping[str, Any]) -> list[str]:
    """The `answer` of a row as a list. Raises DataError when it is missing or is no text."""
    given = task.get("answer")
    answers: list[Any] = given if isinstance(given, list) else [given]
    if not answers or not all(isinstance(text, str) for text in answers):
        raise DataError(
            f"the row's answer is {given!r}; write a text, or a list of texts, under the key 'answer'"
        )
    return answers


def normalized(text: str, ignore_case: bool = False) -> str:
    """Unicode's compatibility form (NFKC), with one space for each run of white space, and none at the ends."""
    text = " ".join(unicodedata.normalize("NFKC", text).split())
    return text.casefold() if ignore_case else text


@lru_cache(maxsize=256)
def _expression(text: Any) -> re.Pattern[str]:
    try:
        return re.compile(text, re.DOTALL)
    except (re.error, TypeError) as error:
        raise DataError(f"the row's extract, {text!r}, is no regular expression: {error}; mend it") from error


# Equality of mathematical answers, as math-verify judges it (github.com/huggingface/Math-Verify).
#
# What is equal is the library's to say. Around it stands what it leaves open or misreads:
#
# - which part of a text is the answer: the last `\boxed{...}` whose braces close; without one, the rest of the line
# after
#   the last `####` or "answer is"; without either, what the library finds in the whole text;
# - spellings: thousands (`1{,}000`, `1\,000`), repeating decimals (`0.\overline{3}`), parentheses around parentheses, a
#   letter after `\le` (which it takes for a unit), and i as the imaginary unit in `e^{i\pi}`;
# - a limit: the library's own is a signal of 5 s. Each answer is judged in a fork of this process (`limited_fork`), so
#   that a tower of powers costs the reward of its sample, and nothing else.
#
# Row: `answer`, a text or a list of texts of which one must be equal.

LENGTH = 4000
"""Characters of an answer, without the text around it; a longer one has no reward."""

_BRACE = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
"""The begin of a box, an escaped letter, or a brace."""
_MARK = re.compile(r"####|answer\s*(?:is|=|:)\s*:?", re.IGNORECASE)
_DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[")
_DISPLAYED = re.compile(r"(?:\$\$|\\\[)(.*?)(?:\$\$|\\\])", re.DOTALL)
_WORD = re.compile(r"(?<![\\A-Za-z{])(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi|or|and|in)\b)[A-Za-z]{2,}")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_LETTERS = re.compile(r"[A-Za-z][A-Za-z '.-]*")
_LONG_WORD = re.compile(r"[A-Za-z]{4}")
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}|\\[,:; !]|,\\!|~)(?=\d{3}(?!\d))")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{(\d+)\}")
_RELATION = r"\\[lg]eq?(?:slant)?(?![A-Za-z])|[<>]"
_LETTER_LAST = re.compile(rf"\$*((?:(?!{_RELATION})[^=$])+)({_RELATION})\s*([A-Za-z])\s*\$*")


def math_expression(prompt: Prompt, answer: str, task: Mapping[str, Any]) -> float:
    """1 if the answer equals a reference answer, else 0. Raises DataError for a row without one."""
    references = reference_answers(task)
    return float(equal(answer, references))


def equal(answer: str, references: Sequence[str]) -> bool:
    """Whether the answer in a text is one of `references`, as a text or by the library's judgement."""
    part = extracted(answer)
    if not part or len(part) > LENGTH:
        return False
    wanted = [extracted(text) for text in references]
    words = _words(part)
    if any(normalized(part) == normalized(text) or (words and words == _words(text)) for text in wanted):
        return True
    # The library reads a word as the product of its letters: "listen" would be "silent".
    wanted = [text for text in wanted if not (words and _words(text))]
    if not wanted:
        return False
    prepare()
    return process_limits.ask(lambda: _judged(part, wanted)) is True


def extracted(answer: str) -> str:
    """The part of a text that is its answer; empty where there is none."""
    if (box := _last_box(answer)) is not None:
        return box.strip().rstrip(".").strip()
    marks = list(_MARK.finditer(answer))
    text = answer[marks[-1].end() :].lstrip(" \t\r\n*") if marks else answer
    if marks:
        displayed = _DISPLAYED.match(text)
        text = displayed[1] if displayed else text.partition("\n")[0].rstrip("* \r")
    return text.strip().rstrip(".").strip()


def _words(text: str) -> str:
    r"""A text that is words and no formula (`\text{Evelyn}`, or four letters or more in a row), without its dress."""
    bare = _TEXT.sub(r"\1", text)
    if not _LETTERS.fullmatch(bare) or (bare == text and not _LONG_WORD.search(bare)):
        return ""
    return normalized(bare, ignore_case=True)


@cache
def prepare() -> None:
    """Import the library, once in a process, and fill the caches of its parser, which forks then have."""
    import math_verify  # noqa: F401

    # It warns that limits are off; these are the fork's.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _judged(r"(\frac{1}{2}x+\sqrt{3})^2", [r"\frac{x^2}{4}+\sqrt{3}x+4"])
    _judged(r"x \le 3 \text{ or } x=5", [r"\{1, 2\}"])


def _judged(part: str, references: Sequence[str]) -> bool:
    found = _parsed(part)
    return any(_same(_parsed(text), found) for text in references)


def _same(reference: list[Any], found: list[Any]) -> bool:
    """Whether the library holds two parsed answers for equal; the first one says what form is wanted."""
    from math_verify import verify

    settings: dict[str, Any] = {"allow_set_relation_comp": True, "timeout_seconds": None}
    if verify(reference, found, **settings):
        return True
    # The library reads the i of $e^{i\pi}$ as a letter.
    complexes = [_with_imaginary_unit(values) for values in (reference, found)]
    return complexes != [reference, found] and bool(verify(*complexes, **settings))


def _with_imaginary_unit(values: list[Any]) -> list[Any]:
    from sympy import I

    return [
        value.subs({symbol: I for symbol in value.free_symbols if symbol.name == "i"})
        if hasattr(value, "free_symbols")
        else value
        for value in values
    ]


def _parsed(part: str) -> list[Any]:
    """What the library reads: of a formula as a whole, of a sentence what it finds in it."""
    from math_verify import parse

    text = _spelled(part)
    prose = "\\" not in text and _WORD.search(text) and re.search(r"\d", text)
    sentence = _DELIMITED.search(text.strip("$")) or prose
    found: list[Any] = parse(text if sentence else f"\\boxed{{{text.strip('$')}}}", parsing_timeout=None)
    return found


def _spelled(text: str) -> str:
    """The same answer in spellings that the library reads."""
    text = _REPEATING.sub(_fraction, _THOUSANDS.sub("", text))
    if bound := _LETTER_LAST.fullmatch(text.strip()):
        text = f"{bound[3]} {_turned(bound[2])} {bound[1]}"
    return _single_parentheses(text)


def _turned(relation: str) -> str:
    """The relation that holds between the same two sides in the other order."""
    strict = {"<": ">", ">": "<"}
    return strict.get(relation) or (r"\ge" if relation[1] == "l" else r"\le")


def _fraction(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction: a.b(c) = (abc − ab) / (10^|b| (10^|c| − 1))."""
    whole, fixed, period = match.groups()
    value = Fraction(
        int(whole + fixed + period) - int(whole + fixed or "0"), 10 ** len(fixed) * (10 ** len(period) - 1)
    )
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _single_parentheses(text: str) -> str:
    """Without parentheses that hold nothing but parentheses: the library's parser needs seconds for a hundred."""
    opened: list[int] = []
    closes: dict[int, int] = {}
    for place, letter in enumerate(text):
        if letter == "(":
            opened.append(place)
        elif letter == ")" and opened:
            closes[opened.pop()] = place
    spare = {
        place for start, end in closes.items() if closes.get(start + 1) == end - 1 for place in (start, end)
    }
    return "".join(letter for place, letter in enumerate(text) if place not in spare)


def _last_box(text: str) -> str | None:
    """The content of the last box that closes; of a box in a box, that of the inner one. None without one."""
    opened: list[tuple[int, bool]] = []
    start = end = -1
    for match in _BRACE.finditer(text):
        if match[1] or match[0] == "{":
            opened.append((match.end(), bool(match[1])))
        elif match[0] == "}" and opened:
            begin, is_box = opened.pop()
            if is_box and begin > start:
                start, end = begin, match.start()
    return text[start:end] if start >= 0 else None
