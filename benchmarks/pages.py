"""What a benchmark writes into a page of docs/: the lines between its marks, which nobody edits by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
_END = "<!-- end -->"


def put(page: Path, script: str, lines: Iterable[str]) -> None:
    """Between the marks of this script. The rest of the page stays as it is."""
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
