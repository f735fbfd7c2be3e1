"""Answer of the planner, whatever was asked, and its four renderers: a short text, all of it as text, JSON and a page.

Each kind of question has a builder: `training` (one question), `sweep_tables` (a series), `generate.answer` and
`submodels.answer`. No builder prints, and no renderer computes: what takes more time than the answer, its file and its
page, is a function that is called where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from hyper_parallel.report.html import asset, badge, card, filled, sheet_table
from hyper_parallel.report.sheets import Fact, Sheet
from hyper_parallel.report.table import render, wrapped


@dataclass(frozen=True)
class OutputFile:
    """A file for another command."""

    text: str
    notes: Sequence[str]
    """What it says otherwise than was planned."""
    command: str
    """The command that reads it, without the file's path."""
    options: str = ""
    """What follows the path."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page that works offline. Texts are plain, `body` and `notes` are HTML."""

    word: str
    """The kind of its numbers, as of `Answer`."""
    title: str
    verdict: str
    heading: str
    facts: Sequence[Fact]
    body: str
    """Charts."""
    sheets: Sequence[Sheet]
    notes: str = ""
    styles: Sequence[str]
    """Style sheets of `report/assets`."""

    def html(self) -> str:
        """The page's text."""
        mark = badge(self.word)
        slots = {
            "title": escape(self.title),
            "verdict": f"{mark} {escape(self.verdict)}",
            "heading": escape(self.heading),
            "facts": "".join(
                card(fact.name, f'<div class="value">{escape(fact.value)}</div><p>{escape(fact.meaning)}</p>')
                for fact in self.facts
            ),
            "body": self.body,
            "word": self.word,
            "tables": "".join(sheet_table(sheet, mark) for sheet in self.sheets),
            "notes": self.notes,
            "style": "".join(map(asset, self.styles)),
        }
        return filled("plan.html", slots)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The planner's answer to a question."""

    word: str
    """The kind of its numbers: `estimated` or `simulated`. Texts begin with it."""
    verdict: str
    """The answer in a sentence."""
    lines: Sequence[tuple[str, str]]
    """What the short answer has below the verdict, each with its name."""
    heading: str
    """What is answered."""
    facts: Sequence[Fact] = ()
    sheets: Sequence[Sheet]
    brief: Sheet | None = None
    """The table of a short answer that is one; the details stand in its place, not behind it."""
    sentences: Sequence[str] = ()
    """What follows from the tables; where the short answer is a table, the first is its verdict."""
    notes: Sequence[str] = ()
    """What to know besides."""
    data: Mapping[str, Any]
    """All of it as plain data; times are seconds, memory is bytes."""
    file: Callable[[], OutputFile] | None = None
    """The file of the best plan; None where there is none."""
    drawn: Callable[[], Page] | None = None

    def short(self, width: int = 80) -> str:
        """The verdict and what it rests on, for the terminal."""
        parts = [wrapped(self.verdict, width)]
        if self.brief is not None:
            parts += ["", render("", [], [self.brief], self.word, width).strip()]
            parts += [wrapped(sentence, width) for sentence in self.sentences[1:]]
        beside = max(len(name) for name, _ in self.lines) + 2
        parts += [wrapped(text, width, " " * beside, first=name.ljust(beside)) for name, text in self.lines]
        parts += [wrapped(f"note: {note}", width) for note in self.notes]
        return "\n".join(parts)

    def text(self, width: int = 140) -> str:
        """All of it, for the terminal."""
        body = render(self.heading, self.facts, self.sheets, self.word, width).rstrip()
        ends = [*self.sentences, *(f"note: {note}" for note in self.notes)]
        return "\n".join([body, "", *(wrapped(end, width) for end in ends)])

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return dict(self.data)

    def page(self) -> str:
        """All of it as HTML."""
        assert self.drawn is not None, "a page is asked for where there is one"
        return self.drawn().html()
