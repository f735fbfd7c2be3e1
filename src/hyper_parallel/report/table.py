"""Figures and tables as text for the terminal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from hyper_parallel.report.sheets import Fact, Sheet, facts, heading, sheets
from hyper_parallel.trace import Timeline

WIDTH = 120
"""Default width of the text in columns."""


def table(timeline: Timeline, width: int = WIDTH) -> str:
    """Plain text, at most `width` columns wide. Its first word is `predicted` or `measured`."""
    return render(heading(timeline), facts(timeline), sheets(timeline), timeline.word, width)


def render(
    first: str, figures: Sequence[Fact], tables: Sequence[Sheet], word: str, width: int = WIDTH
) -> str:
    """Plain text, at most `width` columns wide: a line, then figures, then tables, each headed by `word`.

    `word` states the kind of the numbers: predicted, measured or estimated.
    """
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(first, markup=False, highlight=False)
    if figures:
        console.print()
        grid = Table(box=None, show_header=False, pad_edge=False)
        for _ in range(3):
            grid.add_column(overflow="fold")
        grid.columns[1].justify = "right"
        for fact in figures:
            grid.add_row(*_plain((fact.name, fact.value, fact.meaning)))
        console.print(grid)
    for sheet in tables:
        console.print()
        console.print(f"{word}: {sheet.title}", markup=False, highlight=False)
        console.print(_grid(sheet))
        if sheet.note:
            console.print(sheet.note, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _grid(sheet: Sheet):  # type: ignore[no-untyped-def]
    from rich.table import Table

    made = Table(pad_edge=False)
    for at, column in enumerate(sheet.columns):
        made.add_column(column, justify="left" if at < sheet.left else "right", overflow="fold")
    for row in sheet.rows:
        if row[0] in ("sum", "step"):
            made.add_section()
        made.add_row(*_plain(row))
    return made


def _plain(cells: tuple[str, ...]) -> list[str]:
    """Cells with rich's markup escaped."""
    return [cell.replace("[", r"\[") for cell in cells]
