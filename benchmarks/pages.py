"""Tables in docs/: what a benchmark writes between its marks, which nobody edits by hand.

A script names its result and the parts of pages that show it:

    BENCHMARK = Benchmark("tiers", {"tiers.md": page})

where `page` gives the lines for a result. `BENCHMARK.keep(result)` writes both; `write_pages.py` writes the tables anew
from the results that are kept, and the tests hold each table against its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measure import ROOT, is_elsewhere, kept, path_of, write

DOCS = ROOT / "docs"
_END = "<!-- end -->"

Lines = Callable[[Mapping[str, Any]], Iterable[str]]
"""The lines of a part of a page, for a result as the file has it."""


@dataclass(frozen=True)
class Benchmark:
    """A result, and the pages of docs/ that show it between the marks of `<name>.py`."""

    name: str
    pages: Mapping[str, Lines] = field(default_factory=dict)
    key: str | None = None
    """Of a result that grows row by row (`Rows`): where its rows are."""

    @property
    def script(self) -> str:
        """The script of the marks."""
        return f"{self.name}.py"

    @property
    def path(self) -> Path:
        """The result."""
        return path_of(self.name)

    def kept(self) -> dict[str, Any]:
        """The result as it was written last; empty where there is none."""
        return kept(self.name)

    def keep(self, result: Mapping[str, Any]) -> None:
        """Write the result and the pages, and say where."""
        print(write(self.name, result), flush=True)
        if not is_elsewhere():
            self.write_pages()

    def write_pages(self) -> None:
        """Write the pages from the result that is kept, if it is there."""
        if self.path.exists():
            for page, lines in self.pages.items():
                put(DOCS / page, self.script, lines(json.loads(self.path.read_text())))


def table(header: str, rows: Iterable[Sequence[object] | str], align: str = "") -> Iterator[str]:
    """A table in Markdown. `header`: the titles, with ``|`` between them, of which some may be empty; `align`: ``l`` or
    ``r`` for each column, left where it ends; a row is its cells, or the whole line."""
    titles = [title.strip() for title in header.split("|")]
    yield f"|{'|'.join(f' {title} ' if title else ' ' for title in titles)}|"
    sides = align.ljust(len(titles), "l")
    yield "|" + "".join("--:|" if side == "r" else "---|" for side in sides[: len(titles)])
    for row in rows:
        yield row if isinstance(row, str) else f"| {' | '.join(map(str, row))} |"


def spaced(*parts: str | Iterable[str]) -> Iterator[str]:
    """Paragraphs, and tables or lists as their lines, with an empty line between two of them."""
    for place, part in enumerate(parts):
        if place:
            yield ""
        yield from [part] if isinstance(part, str) else part


def put(page: Path, script: str, lines: Iterable[str]) -> None:
    """Replace what is between the marks of this script. The rest of the page stays as it is."""
    before, _, after = _split(page, script)
    page.write_text(before + "\n".join(lines).strip("\n") + after)


def written(page: Path, script: str) -> list[str]:
    """The lines that are there now."""
    return _split(page, script)[1].splitlines()


def _split(page: Path, script: str) -> tuple[str, str, str]:
    """What is before, between and behind the marks, which belong to the outside with their line breaks."""
    text, begin, end = page.read_text(), f"<!-- written by benchmarks/{script} -->\n", f"\n{_END}"
    if text.count(begin) != 1:
        raise ValueError(f"{page} has the mark {begin.strip()!r} {text.count(begin)} times; it needs it once")
    before, rest = text.split(begin)
    if rest.startswith(_END):
        return before + begin, "", f"\n{rest}"
    between, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"{page} has no {_END!r} behind {begin.strip()!r}")
    return before + begin, between, mark + after
