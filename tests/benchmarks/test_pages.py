"""Pages that benchmarks write: what they show is what was kept, and nothing else on them changes."""

from __future__ import annotations

import json
from pathlib import Path

import pages
import pytest
import write_pages
from measure import RESULTS


@pytest.mark.parametrize("part", write_pages.PARTS, ids=lambda part: f"{part.page}, {part.script}")
def test_a_page_shows_the_result_that_is_kept(part: write_pages.Written) -> None:
    shown = pages.written(pages.DOCS / part.page, part.script)
    result = RESULTS / part.result
    if result.exists():
        wanted = "\n".join(part.lines(json.loads(result.read_text()))).strip("\n")
        assert "\n".join(shown) == wanted, "python benchmarks/write_pages.py writes it anew"


@pytest.mark.parametrize("there", ["", "old\n", "old\n\nolder\n"])
def test_lines_go_between_their_marks_and_nothing_else_changes(tmp_path: Path, there: str) -> None:
    page = tmp_path / "page.md"
    other = "<!-- written by benchmarks/b.py -->\nkept\n<!-- end -->\n"
    page.write_text(
        f"{other}before\n<!-- written by benchmarks/a.py -->\n{there}<!-- end -->\nafter\n{other[:-1]}"
    )
    with pytest.raises(ValueError, match="2 times"):
        pages.put(page, "b.py", ["x"])
    for _ in range(2):
        pages.put(page, "a.py", ["", "one", "", "two", ""])
        assert pages.written(page, "a.py") == ["one", "", "two"]
        wanted = "<!-- written by benchmarks/a.py -->\none\n\ntwo\n<!-- end -->"
        assert page.read_text() == f"{other}before\n{wanted}\nafter\n{other[:-1]}"


def test_a_page_without_marks_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="0 times"):
        pages.put(page, "a.py", ["x"])
